"""Control points: what a workflow has done already, so that a rerun goes on where it stopped.

Each step has a record, and its :mod:`scope <.scope>` has one that lists its steps::

    (no record) --begin--> in progress --record--> confirm --sent--> done
         ^--nothing was done--/       \\------------------------------^

A scope that is closing or closed begins no step any more. A task is sent first and crossed off
afterwards; if the process ends between the two, the next run sends it again, under the same id.

Which task confirms or undoes a step is what the code of the run says. The record says it too, for
the one case in which no code can be asked: the process of every run was lost, so what gives the
message up is the worker's main process, and running the task once more to learn its ``undo`` could
kill that run as well. That record is believed only if it is signed, or in this process's memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from inspect import iscoroutinefunction
from typing import Any
from uuid import NAMESPACE_URL, uuid4, uuid5

from celery import chain
from celery.canvas import Signature, maybe_signature
from celery.utils.log import get_task_logger
from kombu.utils.json import dumps, loads

from ..store.connections import refuse_open_transaction
from ..store.protocol import KEEP_SECONDS, key_of
from ..store.vault import Vault
from ..text import error_site, printable
from .errors import (
    Compensated,
    NotDispatched,
    OtherInput,
    SafeError,
    StepNotRecorded,
    StoreUnavailable,
)
from .guard import Run
from .names import input_of, text_of
from .scope import CLOSED, CLOSING, OPEN, Scope
from .writes import settle

__all__ = ["Steps", "step_key"]

logger = get_task_logger(__name__)

#: Of the ids of the tasks that confirm or undo a step.
_NAMESPACE = uuid5(NAMESPACE_URL, "https://pypi.org/project/celery-sqs-backoff/#step")

IN_PROGRESS, CONFIRM, DONE = "in progress", "confirm", "done"

#: The list is one record, and DynamoDB's hold 400 KB.
_MAX_LISTED = 1000
_MAX_NAME_CHARACTERS = 200

#: The undoing tasks of a scope are one message: 256 KiB on SQS, where Celery and kombu each encode
#: it in base64. Each counts with its arguments, and so much for the step's result; where larger
#: results do not fit, ``None`` stands in for them.
_MAX_UNDO_CHARACTERS = 120_000
_RESULT_CHARACTERS = 1_000

_ROLLBACK = (
    "a rollback would undo the work, but not its record. Leave the atomic block first, or open it"
    " inside the step's function"
)

#: A step's record and its scope's are written anew, to be kept for another 30 days, when they are
#: used after a day.
_RENEW_SECONDS = 24 * 3600.0


class Steps:
    """The steps of one scope, as one run sees them.

    Arguments:
        vault: where they are recorded.
        scope: what sets this workflow apart from all others.
        app: the Celery app that sends ``confirm`` and ``undo``.
        run: the run that asks.
        is_certain: whether a step's exception says that nothing was done.
        note_act: called once a step has been done, or is in doubt.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        vault: Vault,
        scope: str,
        app: Any,
        run: Run,
        *,
        is_certain: Callable[[BaseException], bool] = lambda _: False,
        note_act: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._vault = vault
        self._name = scope
        self._app = app
        self._run = run
        self._is_certain = is_certain
        self._note_act = note_act
        self.scope = Scope(vault, scope)
        #: The undoing tasks that the code of this run has named.
        self._undo: dict[str, Signature] = {}

    # Doing

    def do(
        self,
        name: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        undo: Signature | None,
        confirm: Signature | None,
    ) -> Any:
        """Return what the step has returned before, or do it now. See ``SafeTask.step``."""
        name = text_of("name", name)  # 7 and "7" are one step, listed once
        _refuse_async(name, fn)
        _check("undo", undo)
        _check("confirm", confirm)
        refuse_open_transaction(f"The step {name!r} cannot be done", why=_ROLLBACK)
        if undo is not None:
            self._undo[name] = undo
        key = self._key(name)
        given = self._vault.digests("input", input_of(fn, args, kwargs))
        text, is_ours = self._begun(key, given[0], undo)
        if loads(text)["input"] not in given:
            raise OtherInput(
                f"same key, other input: the step {name!r} was begun with other arguments"
            )
        begins = loads(text)["state"] == IN_PROGRESS
        self._note(name, text if is_ours else None, key, undo, begins=begins)
        if not is_ours:
            text = self._joined(key, _with_undo(self._vault, key, text, undo))
        if loads(text)["state"] == IN_PROGRESS:
            try:
                result = fn(*args, **kwargs)
            except BaseException as exc:
                if not self._is_certain(exc):
                    self._note_act()
                elif is_ours:
                    self._forget(key, text)
                raise
            self._note_act()
            text = self._recorded(key, text, result, undo, confirm)
        record = loads(text)
        if record["state"] == CONFIRM:
            self._send_confirm(key, text, confirm)
        elif self._clock() - record.get("at", 0) > _RENEW_SECONDS:
            settle(self._vault, key, text, self._dated(record), KEEP_SECONDS)
        return loads(self._vault.reveal(record["result"]))

    def _begun(self, key: str, given: str, undo: Signature | None) -> tuple[str, bool]:
        """Note that the step begins; return the record, and whether this run has made it."""
        note = {
            "state": IN_PROGRESS,
            "message": self._run.message,
            "run": self._run.id,
            "input": given,
            "id": uuid4().hex,  # of this step: one that a person frees and is done again is another
        }
        if undo is not None:
            note["undo"] = _hidden(self._vault, undo)
        mine: str = dumps(note)
        there = self._vault.add(key, mine, KEEP_SECONDS)
        return (mine, True) if there in (None, mine) else (str(there), False)

    def _joined(self, key: str, text: str) -> str:
        """Go on with a step of another run, which may not take its note back now.

        It stays its message's if this one is given up by nobody.
        """
        while (record := loads(text))["state"] == IN_PROGRESS:
            mine: str = dumps(record | self._run.mark | {"runs": record.get("runs", 1) + 1})
            if settle(self._vault, key, text, mine, KEEP_SECONDS):
                return mine
            there = self._vault.get(key)
            if there is None:
                raise StoreUnavailable("The step's record comes and goes")
            text = there  # of a third run
        return text

    def _forget(self, key: str, text: str) -> None:
        try:
            self._vault.delete(key, text)
        except SafeError as exc:  # a step in doubt, then; its own error is what counts
            logger.error("sqs_backoff.step_note_not_removed: %s", error_site(exc))

    def _recorded(
        self,
        key: str,
        text: str,
        result: object,
        undo: Signature | None,
        confirm: Signature | None,
    ) -> str:
        try:
            loads(kept := dumps(result))  # a provider's "__type__" is read as kombu's own
            done = {
                "state": DONE if confirm is None else CONFIRM,
                "result": self._vault.hide(kept),
            }
            if undo is not None:
                done["undo"] = _hidden(self._vault, undo)
        except Exception as exc:  # whatever JSON's hooks raise
            raise StepNotRecorded(
                "The step was done, but its result is not JSON, so it is not recorded:"
                " let it return text, numbers, lists and dicts"
            ) from exc
        try:
            while True:
                new = self._dated(loads(text) | done)
                if settle(self._vault, key, text, new, KEEP_SECONDS):
                    return new
                there = self._vault.get(key)
                if there is None:  # it has ended: the step took longer than records are kept
                    there = self._vault.add(key, new, KEEP_SECONDS) or new
                if loads(there)["state"] != IN_PROGRESS:
                    return there  # another run was quicker: what it has recorded is what counts
                text = there
        except Exception as exc:  # a soft time limit too: none of the task's rules may repeat it
            raise StepNotRecorded("The step was done, but the store did not record it") from exc

    def _dated(self, record: dict[str, Any]) -> str:
        text: str = dumps(record | {"at": int(self._clock())})
        return text

    def _send_confirm(self, key: str, text: str, confirm: Signature | None) -> None:
        if confirm is not None:  # what is sent is what the code names now, not what the record says
            record = loads(text)
            result = loads(self._vault.reveal(record["result"]))
            task = _bound(confirm, result, record["id"], CONFIRM)
            _send(task, "The step's task to confirm it")
        settle(self._vault, key, text, self._dated(loads(text) | {"state": DONE}), KEEP_SECONDS)

    def begun_by(self) -> list[object]:
        """Return, for each step that was done or is in doubt, the message that last began it."""
        texts = (self._vault.get(self._key(name)) for name in self.scope.read()["steps"])
        return [loads(text).get("message") for text in texts if text]

    # Undoing

    def compensate(self) -> None:
        """Close the scope, and send the undoing tasks of its steps as one chain, the last first."""
        scope = self.scope.change(state=CLOSING, closed_by=self._run.id)
        if scope["state"] == CLOSED:
            return
        undoing = self._all_undoing(scope["steps"], _MAX_UNDO_CHARACTERS)
        if sum(len(dumps(task)) for task in undoing) > _MAX_UNDO_CHARACTERS:
            undoing = self._all_undoing(scope["steps"], _RESULT_CHARACTERS)
        if undoing:
            task = undoing[0] if len(undoing) == 1 else chain(*undoing, app=self._app)
            wait = (scope.get("undo_at") or 0.0) - self._clock()
            _send(task, "What undoes the steps", **({"countdown": wait} if wait > 0 else {}))
        self.scope.change(state=CLOSED)

    def _all_undoing(self, names: list[str], max_result: int) -> list[Signature]:
        return [task for name in reversed(names) if (task := self._undoing(name, max_result))]

    def _undoing(self, name: str, max_result: int) -> Signature | None:
        """Return the task that undoes a step; ``None`` if it has none, or was never begun."""
        key = self._key(name)
        text = self._vault.get(key)
        if text is None:
            return None
        record = loads(text)
        undo = self._undo.get(name)
        if undo is None and "undo" not in record:
            return None
        if undo is None and self._vault.is_trusted:
            undo = maybe_signature(loads(self._vault.reveal(record["undo"])), app=self._app)
        if undo is None:
            logger.error("sqs_backoff.step_not_undone: %s: undo it by hand", printable(name))
            return None
        result = self._vault.reveal(record["result"]) if "result" in record else "null"
        kept = loads(result) if len(result) <= max_result else None
        task = _bound(undo, kept, record["id"], "undo")
        task.immutable = True  # in the chain it would get what the one before it returns
        return task

    # The list

    def _note(
        self, name: str, ours: str | None, key: str, undo: Signature | None, *, begins: bool
    ) -> None:
        """Before the step is done: list it. A closed scope begins none."""
        size = 0 if undo is None else len(dumps(undo)) + _RESULT_CHARACTERS

        def listed(scope: dict[str, Any]) -> dict[str, Any]:
            total = scope.get("undo", 0) + size
            # What has ended well is no longer taken back, until another step is done.
            goes_on: dict[str, Any] = {"ended": False} if begins and scope.get("ended") else {}
            if self._clock() - scope.get("at", 0) > _RENEW_SECONDS:
                goes_on["at"] = int(self._clock())  # the list is kept for as long as its steps
            if name in scope["steps"]:
                return goes_on
            if len(scope["steps"]) < _MAX_LISTED and total <= _MAX_UNDO_CHARACTERS:
                return {"steps": [*scope["steps"], name], "undo": total, **goes_on}
            if undo is None:
                return goes_on
            self._take_back_note(key, ours)
            raise ValueError(
                f"too many steps with undo in one scope: at most {_MAX_LISTED}, whose undo tasks"
                f" fit into one message of {_MAX_UNDO_CHARACTERS} characters (each with its"
                f" arguments, and {_RESULT_CHARACTERS} for the step's result)"
            )

        if self.scope.update(listed)["state"] == OPEN:
            return
        self._take_back_note(key, ours)
        self.compensate()
        raise Compensated("The steps of this workflow have been taken back")

    def _take_back_note(self, key: str, ours: str | None) -> None:
        if ours is not None:
            self._vault.delete(key, ours)

    def _key(self, name: str) -> str:
        return step_key(self._name, name)


def step_key(scope: str, name: str) -> str:
    """Return the key of a step's record.

    Raises:
        TypeError, ValueError: the name is not text, an int or a UUID, or is empty or too long.
    """
    text = text_of("name", name)
    if len(text) > _MAX_NAME_CHARACTERS:
        raise ValueError(f"invalid name: expected at most {_MAX_NAME_CHARACTERS} characters")
    return key_of("step", scope, text)


def _bound(signature: Signature, result: object, step: str, what: str) -> Signature:
    """Complete a signature as Celery does a callback: the result goes first."""
    # The same id whenever it is sent: what that task derives from its id stays the same too.
    task_id = str(uuid5(_NAMESPACE, f"{what} {step}"))
    return signature.clone(args=(result,), task_id=task_id)


def _hidden(vault: Vault, undo: Signature) -> str:
    text: str = dumps(dict(undo))
    return vault.hide(text)


def _with_undo(vault: Vault, key: str, text: str, undo: Signature | None) -> str:
    """Record the undo that this run's code names: a release may have changed it, or added it."""
    record = loads(text)
    if undo is None or not vault.is_trusted:
        return text
    there = loads(vault.reveal(record["undo"])) if "undo" in record else None
    if there == loads(dumps(dict(undo))):
        return text
    new: str = dumps(record | {"undo": _hidden(vault, undo)})
    return new if settle(vault, key, text, new, KEEP_SECONDS) else text


def _send(task: Signature, what: str, **options: Any) -> None:
    try:
        task.apply_async(**options)
    except Exception as exc:  # whatever the broker's library raises
        raise NotDispatched(f"{what} could not be sent: {error_site(exc)}") from exc


def _refuse_async(name: str, fn: Callable[..., Any]) -> None:
    if iscoroutinefunction(fn):
        raise TypeError(f"the step {name!r} is an async function: nobody would await it")


def _check(option: str, signature: object) -> None:
    """Refuse what could not be recorded, or sent as is promised, before the step is done."""
    if signature is None:
        return
    # A chain or group would not get the result, nor the same task ids whenever it is sent.
    if not isinstance(signature, Signature) or signature.subtask_type is not None:
        raise TypeError(
            f"invalid {option}, a {type(signature).__name__}: expected the signature of one task,"
            " which may start others, or None"
        )
    try:
        dumps(signature)
    except (TypeError, ValueError) as exc:
        raise TypeError(
            f"invalid {option}: expected a signature whose arguments are JSON: {exc}"
        ) from exc
