r"""May this message do it? Another may have done it a moment ago.

A guard's record says which run of which message made it, and how far that run got::

    (no record) --enter--> in progress --enter again--> in progress, marked --finish--> done
         ^-----unset-----------/ |                                                       ^
                                 +--------------------finish-----------------------------+

Only the run that made the record can unset it, and only while no other run of the same message has
passed: two deliveries of one message are two runs, and the second marks the record.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from string import Formatter
from typing import Any, NoReturn
from uuid import uuid4

from celery.exceptions import ImproperlyConfigured
from kombu.utils.json import dumps, loads

from ..store.protocol import key_of, seconds_kept
from ..store.vault import Vault
from .errors import OtherInput, Refused
from .names import text_of
from .writes import MARK, add_or_mark

__all__ = ["Guard", "Passage", "Run", "enter", "finish", "is_joined", "read_record", "unset"]

_IN_PROGRESS, _DONE = "in progress", "done"

#: Somebody else's record comes and goes while we look at it: try again, so often.
_TRIES = 10

#: Largest result that is kept with a guard, in characters of JSON.
_MAX_RESULT = 64 * 1024


@dataclass(frozen=True)
class Run:
    """One run of one message: the same message delivered again is another run.

    Arguments:
        message: stands for the task's name and the Celery task id.
        id: of the run; no two have the same.
        input: stands for the task's arguments.
        former: the same run, as records of before a change of the secret name it.
        comes_back: whether it is of a message that ends well, comes back or is given up. Nobody
            gives up a call as a function, outside any message.
    """

    message: str
    id: str
    input: str = ""
    former: tuple[Run, ...] = ()
    comes_back: bool = True

    @classmethod
    def of(cls, vault: Vault, task_name: str, task_id: str, run_id: str) -> Run:
        """Return a run of a task's message."""
        message, *former = vault.digests("message", task_name, task_id)
        return cls(message, run_id, former=tuple(cls(name, run_id) for name in former))

    @property
    def messages(self) -> tuple[str, ...]:
        """All that records may call its message; the first is what is written now."""
        return (self.message, *(run.message for run in self.former))

    @property
    def mark(self) -> dict[str, str]:
        """What a step notes of the run that goes on with it; nobody gives up a call's message."""
        return {"run": self.id} | ({"message": self.message} if self.comes_back else {})

    def anew(self) -> Run:
        """Return this run under an id of its own, for one of the blocks that it guards.

        A second one, with the same key, must not take back what the first has done.
        """
        return replace(self, id=uuid4().hex)

    def given(self, inputs: Sequence[str]) -> Run:
        """Return this run with its input, under each of the secrets: see ``Vault.digests``."""
        former = (
            replace(run, input=text) for run, text in zip(self.former, inputs[1:], strict=True)
        )
        return replace(self, input=inputs[0], former=tuple(former))


@dataclass(frozen=True)
class Passage:
    """How a run has passed a guard.

    ``is_ours``: this run made the record. ``is_done``: an earlier run of the message is done, and
    ``result`` is what it returned; ``has_result`` is false if that could not be kept.
    """

    key: str
    text: str
    is_ours: bool
    is_done: bool = False
    has_result: bool = False
    result: Any = None


def enter(vault: Vault, key: str, run: Run, window: float) -> Passage:
    """Let one message pass per window; the same one as often as it comes, until it is done.

    Arguments:
        key: of what is guarded, such as ``"mail:7"``.
        run: who passes.
        window: seconds above 0, from the first time the message passed.

    Raises:
        Refused: another message has passed.
        OtherInput: this message has passed, with other arguments.
        StoreUnavailable: nothing is known.
    """
    at = key_of("guard", key)
    mine: str = dumps(_begun(run) | {"run": run.id})
    for known in (run, *run.former):
        # An earlier run of this message was lost, or is still going. Whichever of the two now
        # fails, the other may have done the work: the mark keeps both from unsetting the record.
        there = add_or_mark(vault, at, mine, window, dumps(_begun(known))[:-1])
        if there is None or there == mine:  # a client library may send a call twice
            return Passage(at, mine, is_ours=True)
        record = read_record(there)
        if record["message"] == known.message:
            break
    else:
        why = f"another message has passed this guard within its window of {window:g} s"
        raise Refused({"refused": why})
    if record["input"] != known.input:
        raise OtherInput("same key, other input: this message has passed with other arguments")
    if record["state"] == _DONE:
        has_result = "result" in record
        result = loads(vault.reveal(record["result"])) if has_result else None
        return Passage(at, there, False, is_done=True, has_result=has_result, result=result)
    return Passage(at, there, is_ours=False)


def finish(vault: Vault, passage: Passage, result: object) -> None:
    """Record that the work is done, with its result if JSON can hold it, up to 64 KiB.

    Raises:
        StoreUnavailable: it may have been recorded.
    """
    done: dict[str, Any] = {"state": _DONE}
    try:
        if len(text := dumps(result)) <= _MAX_RESULT:
            loads(text)  # a provider's "__type__" is read as kombu's own, which it is not
            done["result"] = vault.hide(text)
    except Exception:  # noqa: BLE001  # whatever JSON's hooks raise
        pass  # the message is done all the same; see Passage.has_result
    text = passage.text
    for _ in range(_TRIES):
        new = dumps(read_record(text) | done)
        if vault.replace(passage.key, text, new, None):
            return
        there = vault.get(passage.key)
        if there is None or there == new or not _is_another_run_of(there, text):
            return  # the window has ended, or another run of this message was quicker
        text = there


def unset(vault: Vault, passage: Passage) -> bool:
    """Take the record back if this run made it and no other has passed since; whether it was."""
    return passage.is_ours and vault.delete(passage.key, passage.text)


def is_joined(vault: Vault, passage: Passage) -> bool:
    """Whether another run of the same message has passed, before this one or since."""
    there = vault.get(passage.key) if passage.is_ours else None
    if there is None:
        return not passage.is_ours
    same: bool = read_record(there)["message"] == read_record(passage.text)["message"]
    return same and there != passage.text


def read_record(text: str) -> dict[str, Any]:
    """Return the fields of a guard's record, marked or not."""
    record: dict[str, Any] = loads(text.removeprefix(MARK))
    return record


def _begun(run: Run) -> dict[str, Any]:
    return {"state": _IN_PROGRESS, "message": run.message, "input": run.input}


def _is_another_run_of(there: str, text: str) -> bool:
    record = read_record(there)
    same: bool = record["message"] == read_record(text)["message"]
    return same and record["state"] == _IN_PROGRESS


@dataclass(frozen=True, init=False)
class Guard:
    """The task option: at most one message per key and window gets to run.

    Arguments:
        key: text with the task's arguments in braces, ``"mail:{customer_id}"``, or a callable
            that gets the task's arguments and returns text, an int or a UUID. Tasks with the same
            key guard each other.
        window: seconds or timedelta above 0.

    The record is made before the run, for this message: the same message passes again, however
    often it is delivered, retried or redriven, until a run of it has ended well. From then on it
    gets the recorded result. The record is taken back when the failure says that nothing was
    processed (RETRYABLE, NOT_PROCESSED) and no other run of the message may have done it.

    In an argument's text, ``%`` and each character that separates the arguments in ``key`` are
    percent-encoded, so ``"{a}:{b}"`` differs for ``("x:y", "z")`` and ``("x", "y:z")``.

    Raises:
        ImproperlyConfigured: ``key`` or ``window`` is invalid.
    """

    key: str | Callable[..., object]
    window: float

    def __init__(self, *, key: str | Callable[..., object], window: float | timedelta) -> None:
        if not key or not (isinstance(key, str) or callable(key)):
            _refuse("key", key, "text such as 'mail:{customer_id}', or a callable")
        try:
            seconds = seconds_kept("window", window)
        except (TypeError, ValueError) as exc:
            raise ImproperlyConfigured(f"guard: {exc}") from None
        object.__setattr__(self, "key", key)  # the way to fill a frozen dataclass
        object.__setattr__(self, "window", seconds)

    def check(self, signature: inspect.Signature) -> None:
        """Refuse a key with an argument that the task does not have, or with none between two."""
        if not isinstance(self.key, str):
            return
        previous_field, formatter = False, Formatter()
        try:
            parts = list(formatter.parse(self.key))
            for *_, conversion in parts:
                formatter.convert_field("", conversion)
        except ValueError as exc:
            _refuse("key", self.key, f"arguments in braces, such as 'mail:{{customer_id}}' ({exc})")
        for literal, field, _, _ in parts:
            name = None if field is None else field.partition(".")[0].partition("[")[0]
            if name is not None and name not in signature.parameters:
                names = ", ".join(signature.parameters) or "none"
                _refuse("key", self.key, f"only the task's arguments ({names}) in braces")
            # Letters and digits are not encoded in an argument's text: they separate nothing.
            if previous_field and field is not None and (not literal or literal.isalnum()):
                _refuse("key", self.key, "a separator between two arguments, such as '{a}:{b}'")
            previous_field = field is not None

    def key_for(
        self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> str:
        """Return the key of one call of the task.

        Raises:
            TypeError: the callable has not returned text, an int or a UUID, or an argument in the
                key is ``None``.
            ValueError: an argument in the key, or what the callable returned, is empty.
        """
        if callable(self.key):
            return text_of("guard key", self.key(*args, **kwargs))
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return _filled(self.key, bound.arguments)


def _filled(template: str, arguments: Mapping[str, Any]) -> str:
    formatter, parts = Formatter(), list(Formatter().parse(template))
    separators = {"%", *"".join(literal for literal, *_ in parts if literal)}
    separators = {c for c in separators if not c.isalnum()}
    filled = []
    for literal, field, spec, conversion in parts:
        filled.append(literal)
        if field is None:
            continue
        value, _ = formatter.get_field(field, (), arguments)
        if value is None:
            raise TypeError(f"invalid guard key {template!r}: the argument {field!r} is None")
        value = formatter.convert_field(value, conversion)
        text = formatter.format_field(value, spec or "")
        if not text:
            raise ValueError(f"invalid guard key {template!r}: the argument {field!r} is empty")
        filled.append("".join(f"%{ord(c):02X}" if c in separators else c for c in text))
    return "".join(filled)


def _refuse(name: str, value: object, expected: str) -> NoReturn:
    raise ImproperlyConfigured(f"guard: invalid {name} {value!r}: expected {expected}")
