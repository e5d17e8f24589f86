"""Let one message per key run within a time window, however often SQS delivers the message.

Other messages with the same key are refused until the window ends. A record in the store names the
message that has passed the guard::

    (no record) --enter--> begun --finish--> done
         ^----release-----/

If an earlier run of the same message may have had an effect, the next run marks the record as
shared. No run deletes a shared record, because the earlier run may have done the work.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from string import Formatter
from typing import Any, NoReturn

from celery.exceptions import ImproperlyConfigured
from kombu.utils.json import dumps, loads

from ..store.protocol import seconds_kept
from ..store.records import Record, Records
from .errors import Refused
from .names import text_of

#: Largest result that a guard's record stores, in characters of JSON.
_MAX_RESULT_CHARACTERS = 64 * 1024


@dataclass
class Passage:
    """The record that a run has made or found when it passed a guard, and the ID of the run."""

    record: Record
    run: str

    @property
    def is_first(self) -> bool:
        """Whether no earlier run of the message passed, apart from runs that had no effect."""
        return bool(self.record.fields["run"] == self.run and not self.record.fields["shared"])

    @property
    def is_done(self) -> bool:
        """Whether an earlier run of the message has succeeded."""
        return bool(self.record.fields["state"] == "done")

    @property
    def has_result(self) -> bool:
        """Whether the record has the result of the successful run."""
        return "result" in self.record.fields

    @property
    def result(self) -> Any:
        """Result of the successful run, or ``None`` if the record does not have it."""
        return loads(self.record.fields["result"]) if self.has_result else None


def enter(
    records: Records, key: str, message: str, run: str, window: float, *, kind: str = "guard"
) -> Passage:
    """Let a run pass a guard, unless another message has passed it within the window.

    Arguments:
        key: key of the guard.
        message: digest of the message.
        run: ID of the run.
        window: seconds above 0, from the first time the message passed.
        kind: first part of the record's key in the store. ``SafeExtension`` passes ``"run"`` for
            its record of a message's runs.

    Raises:
        Refused: another message has passed.
        StoreUnavailable: the store did not answer.
    """

    def join(there: dict[str, Any]) -> dict[str, Any] | None:
        if there["message"] != message:
            why = f"another message has passed this guard within its window of {window:g} s"
            raise Refused({"refused": why})
        if there["state"] == "done" or there["shared"]:
            return None
        # The record names no run if every earlier run ended without an effect. See ``cut_short``.
        return {"shared": True} if there["run"] else {"run": run}

    mine = {"state": "begun", "message": message, "run": run, "shared": False}
    return Passage(records.update(kind, key, mine, window, join, keeps_end=True), run)


def finish(records: Records, passage: Passage, result: object) -> None:
    """Record that the message is done, with the result if it is JSON and not too large."""
    done = {"state": "done"}
    try:
        loads(text := dumps(result))
        if len(text) <= _MAX_RESULT_CHARACTERS:
            done["result"] = text
    except Exception:  # noqa: BLE001  # JSON's hooks may raise any exception
        pass
    record: Record | None = passage.record
    message = passage.record.fields["message"]
    # If the record is missing or belongs to another message, the window has ended.
    while record is not None and record.fields["message"] == message:
        if record.fields["state"] == "done" or records.replace(record, record.fields | done, None):
            return
        record = records.reread(record)


def cut_short(records: Records, passage: Passage) -> None:
    """Record that the run had no effect, so that the message's next run counts as the first."""
    if passage.is_first:
        records.replace(passage.record, passage.record.fields | {"run": ""}, None)


def release(records: Records, passage: Passage) -> bool:
    """Delete the record, unless another run of the message has passed.

    Return whether the record was deleted.
    """
    return passage.is_first and records.delete(passage.record)


@dataclass(frozen=True, init=False)
class Guard:
    """A task option that lets at most one message per key and window run.

    Arguments:
        key: text with the task's arguments in braces, such as ``"mail:{customer_id}"``. Or a
            callable, which gets the task's arguments and returns text, an int or a UUID. Tasks with
            the same key share one guard.
        window: seconds or timedelta above 0, from the first run of the message.

    Before the task runs, the worker makes a record that names the message. So the same message
    passes again whenever it is delivered, retried or redriven, until one of its runs has succeeded.
    After that, until the window ends, a further delivery of the message ends at once with the
    recorded result.

    If a run fails with RETRYABLE or NOT_PROCESSED, the worker deletes the record, so that another
    message can pass. The record stays if the run has done a step, or if another run of the message
    may have done the work.

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
        object.__setattr__(self, "key", key)  # a frozen dataclass allows no other assignment
        object.__setattr__(self, "window", seconds)

    def check(self, signature: inspect.Signature) -> None:
        """Refuse a key with an argument that the task does not have.

        Raises:
            ImproperlyConfigured: the key has such an argument, or its braces do not match.
        """
        if not isinstance(self.key, str):
            return
        try:
            fields = [field for _, field, _, _ in Formatter().parse(self.key) if field is not None]
        except ValueError as exc:
            _refuse("key", self.key, f"arguments in braces, such as 'mail:{{customer_id}}' ({exc})")
        for field in fields:
            if field.partition(".")[0].partition("[")[0] not in signature.parameters:
                names = ", ".join(signature.parameters) or "none"
                _refuse("key", self.key, f"only the task's arguments ({names}) in braces")

    def key_for(
        self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> str:
        """Return the key of one call of the task.

        Raises:
            TypeError: the callable returned something other than text, an int or a UUID, or an
                argument in the key is ``None``.
            ValueError: an argument in the key, or the callable's result, is empty.
        """
        if callable(self.key):
            return text_of("guard key", self.key(*args, **kwargs))
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return _Filler().vformat(self.key, (), bound.arguments)


class _Filler(Formatter):
    """Fills the task's arguments into a key. Refuses an argument that is ``None`` or empty."""

    def format_field(self, value: Any, format_spec: str) -> str:
        text = str(super().format_field(value, format_spec))
        if value is None:
            raise TypeError("invalid guard key: an argument in it is None")
        if not text:
            raise ValueError("invalid guard key: an argument in it is empty")
        return text


def _refuse(name: str, value: object, expected: str) -> NoReturn:
    raise ImproperlyConfigured(f"guard: invalid {name} {value!r}: expected {expected}")
