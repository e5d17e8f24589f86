"""Record the steps of tasks in the store, so that a later run skips the steps that are done.

Each workflow has one record, which holds its steps. Steps outside a workflow have one record for
each message, or for each ``scope=``. These are the states of a workflow and of a step::

    workflow   open --its message is given up--> closing --all steps are undone--> closed
    step       begun --its result is recorded--> confirm --its confirm task is sent--> done

A step without a confirm task goes from begun to done.

Only the run that holds a workflow's lock may write the workflow's record. But a lock ends with its
lease, and its holder may still be running and try to write. So each write succeeds only if the
record is unchanged since the run read it. The next run changes the record when it enters the
workflow, and then any write of the earlier run fails.

The message that last began a step owns the workflow. When the worker gives that message up (it is
not retried any more), the steps are undone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from inspect import iscoroutinefunction
from typing import Any
from uuid import uuid4, uuid5

from celery.canvas import Signature
from kombu.utils.json import dumps, loads

from ..retry.options import FAIL
from ..store.connections import refuse_open_transaction
from ..store.errors import SafeError
from ..store.protocol import KEEP_SECONDS
from ..store.records import Record, Records
from ..text import error_site
from .errors import Compensated, LockLost, NotDispatched, OtherInput, StepNotRecorded
from .names import NAMESPACE, input_of, text_of
from .run import RunState

OPEN, CLOSING, CLOSED = "open", "closing", "closed"
BEGUN, CONFIRM, DONE = "begun", "confirm", "done"

#: Highest number of steps in a record, of characters in a step's name, and of messages that a
#: record lists as having entered. A record must stay under 400 KB, the largest item that DynamoDB
#: stores.
_MAX_STEPS, _MAX_NAME_CHARACTERS, _MAX_ENTERED = 200, 200, 50

Change = Callable[[dict[str, Any]], Mapping[str, Any]]


class Document:
    """The record of a workflow or of other steps, as one run sees it.

    Arguments:
        kind: ``"scope"`` for a workflow, ``"steps"`` for steps outside a workflow.
        name: name of the workflow, or of the message or scope that owns the steps.
        state: facts about the run. ``step`` adds the name of its step to them, and whether the
            step may have had an effect. ``None`` = new facts.
        message: digest of the message that enters the workflow. From the first step that this
            message begins, it owns the workflow. ``None`` = the owner does not change.
        is_certain: returns whether an exception proves that the step had no effect.
        before: called before each step begins.
    """

    def __init__(
        self,
        records: Records,
        kind: str,
        name: str,
        *,
        state: RunState | None = None,
        message: str | None = None,
        is_certain: Callable[[BaseException], bool] = lambda _: False,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self._records, self._kind, self._name = records, kind, name
        self._state = state or RunState()
        self._message, self._is_certain, self._before = message, is_certain, before
        self._used = self._state.used[f"{kind} {name}"]
        self._record: Record | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of the record. The first access reads the record, or creates a missing one."""
        if self._record is None:
            empty: dict[str, Any] = {"state": OPEN, "steps": {}}
            self._record = self._records.add(self._kind, self._name, empty, KEEP_SECONDS)
        return self._record.fields

    def update(self, change: Change) -> dict[str, Any]:
        """Write the fields that ``change`` returns, and return all fields of the record.

        Arguments:
            change: gets all current fields and returns the fields to change. Outside a workflow,
                it is called again if another run has written the record first.

        Raises:
            LockLost: another run has written the record of this workflow.
        """
        while True:
            fields = self.fields
            assert self._record is not None
            new = self._records.replace(self._record, fields | dict(change(fields)))
            if new is not None:
                self._record = new
                return new.fields
            if self._kind == "scope":
                raise LockLost("another run has continued this workflow")
            self._record = None

    def enter(self) -> None:
        """Record that this run has entered the workflow.

        If an earlier run is still in the workflow, the next write of the earlier run fails.

        Raises:
            Compensated: the steps were undone, or are being undone.
        """

        def change(fields: dict[str, Any]) -> dict[str, Any]:
            entered = fields.get("entered", {})
            others = [(each, at) for each, at in entered.items() if each != self._message]
            mine = [(str(self._message), [self._state.run, time.time()])]
            return {"entered": dict([*others[1 - _MAX_ENTERED :], *mine])}

        if self.update(change)["state"] != OPEN:
            raise Compensated("the steps of this workflow were undone, or are being undone")

    def end(self) -> None:
        """Record that the ``with`` block ended well, so that its steps are never undone.

        A block ends well without an exception, or with ``Ignore``, which ``self.replace()`` raises.
        """

        def change(fields: dict[str, Any]) -> dict[str, Any]:
            kept = {name: step | {"undo": None} for name, step in fields["steps"].items()}
            return {"ended": True, "entered": {}, "steps": kept}

        self.update(change)

    def step(
        self,
        name: object,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        undo: Signature | None = None,
        confirm: Signature | None = None,
    ) -> Any:
        """Do a step, unless the record says that it is done. Return its result."""
        name = text_of("name", name)
        self._check(name, fn, undo, confirm)
        given = self._records.digest("input", input_of(fn, args, kwargs))
        step = self.fields["steps"].get(name)
        if step is not None and step["input"] != given:
            raise OtherInput(f"the step {name!r} was begun with other arguments")
        if step is None or step["state"] == BEGUN:
            self._before()
            step = self._begin(name, given, undo)
            try:
                result = fn(*args, **kwargs)
            except BaseException as exc:
                if step["runs"] == 1 and self._is_certain(exc):
                    self._forget(name, step)
                else:
                    self._state.acts += 1
                raise
            self._state.acts += 1
            step = self._note_done(name, step, result, confirm)
        if step["state"] == CONFIRM:
            if confirm is not None:
                send(confirm, loads(step["result"]), f"confirm {step['id']}")
            step = self._put(name, step | {"state": DONE})
        self._used.add(name)
        return loads(step["result"])

    def _check(self, name: str, fn: Any, undo: object, confirm: object) -> None:
        if len(name) > _MAX_NAME_CHARACTERS:
            raise ValueError(f"invalid name: expected at most {_MAX_NAME_CHARACTERS} characters")
        if name in self._used:
            # With one name for all steps, a loop would do the first step and skip the rest.
            raise ValueError(
                f"invalid name {name!r}: this run has done a step of that name; give each step a"
                " name of its own, such as f'release {funding.pk}'"
            )
        if iscoroutinefunction(fn):
            raise TypeError(
                f"invalid function of the step {name!r}: expected one that is not async"
            )
        check_signature("undo", undo)
        check_signature("confirm", confirm)
        refuse_open_transaction(
            f"The step {name!r} cannot be done",
            why="a rollback would undo the work, but not its record. Leave the atomic block first,"
            " or open it inside the step's function",
        )

    def _begin(self, name: str, given: str, undo: Signature | None) -> dict[str, Any]:
        def change(fields: dict[str, Any]) -> dict[str, Any]:
            steps, old = fields["steps"], fields["steps"].get(name, {})
            if fields["state"] != OPEN:
                raise Compensated("the steps of this workflow were undone, or are being undone")
            if len(steps) >= _MAX_STEPS and not old:
                raise ValueError(f"too many steps in one scope: expected at most {_MAX_STEPS}")
            begun = {
                "state": BEGUN,
                "input": given,
                "id": old.get("id") or uuid4().hex,
                "runs": old.get("runs", 0) + 1,
                "undo": None if undo is None else dumps(dict(undo)),
            }
            owner = {} if self._message is None else {"owner": self._message}
            return {"steps": steps | {name: begun}, "ended": False} | owner

        step: dict[str, Any] = self.update(change)["steps"][name]
        return step

    def _note_done(
        self, name: str, step: dict[str, Any], result: object, confirm: Signature | None
    ) -> dict[str, Any]:
        try:
            # Also decode the text. kombu may fail to decode {"__type__": ..., "__value__": ...}.
            loads(text := dumps(result))
        except Exception as exc:  # JSON's hooks may raise any exception
            raise StepNotRecorded(
                "The step was done, but its result is not JSON, so it is not recorded:"
                " let it return text, numbers, lists and dicts"
            ) from exc
        done = {"state": DONE if confirm is None else CONFIRM, "result": text}
        try:
            return self._put(name, step | done)
        except LockLost:
            raise
        except Exception as exc:  # even a soft time limit must not lead to a second call of ``fn``
            raise StepNotRecorded("The step was done, but the store did not record it") from exc

    def _put(self, name: str, step: dict[str, Any]) -> dict[str, Any]:
        """Write a step and return it. If a concurrent run recorded it first, return that step."""

        def change(fields: dict[str, Any]) -> dict[str, Any]:
            there = fields["steps"].get(name, {"state": BEGUN})
            is_recorded = there["state"] in (DONE, step["state"])
            return {} if is_recorded else {"steps": fields["steps"] | {name: step}}

        new: dict[str, Any] = self.update(change)["steps"][name]
        return new

    def _forget(self, name: str, begun: dict[str, Any]) -> None:
        """Remove a step that had no effect, unless a concurrent run has begun or recorded it."""

        def change(fields: dict[str, Any]) -> dict[str, Any]:
            steps = dict(fields["steps"])
            if steps.get(name) == begun:
                del steps[name]
            return {"steps": steps}

        try:
            self.update(change)
        except SafeError:
            # The update failed, so the record still says that the step may have had an effect.
            # So count the step. Do not raise this error, because the caller raises the step's own.
            self._state.acts += 1


def check_signature(option: str, signature: object) -> None:
    """Refuse a signature that a step cannot record, or cannot send with its result.

    Also refuse an undo task that may end unnoticed: a task without our base class, with
    ``expires``, or with ``on_give_up="fail"``.

    Arguments:
        option: name of the argument, ``"undo"`` or ``"confirm"``.
        signature: signature of one task, or ``None``.

    Raises:
        TypeError: the signature is refused.
    """
    if signature is None:
        return
    if not isinstance(signature, Signature) or signature.subtask_type is not None:
        raise TypeError(
            f"invalid {option}, a {type(signature).__name__}: expected the signature of one task,"
            " which may start other tasks, or None"
        )
    task = None if signature.app is None else signature.app.tasks.get(signature.task)
    expires = signature.options.get("expires") or getattr(task, "expires", None)
    on_give_up = getattr(getattr(task, "backoff_options", None), "on_give_up", FAIL)
    is_unfit = expires is not None or (task is not None and on_give_up == FAIL)
    if option == "undo" and is_unfit:
        raise TypeError(
            f"invalid undo: the task {signature.task} is not an SQSBackoffTask, or has 'expires' or"
            f" on_give_up={FAIL!r}, so it may end unnoticed, and the other steps would not be"
            " undone"
        )
    try:
        dumps(signature)
    except (TypeError, ValueError) as exc:
        raise TypeError(
            f"invalid {option}: expected a signature whose arguments are JSON: {exc}"
        ) from exc


def send(signature: Signature, result: object, what: str, **options: Any) -> None:
    """Send a step's undo or confirm task, with the step's result as first argument.

    The task ID is the same each time, so the task can recognise a repetition.

    Arguments:
        what: ``"undo"`` or ``"confirm"``, followed by the step's ID.

    Raises:
        NotDispatched: the task could not be sent.
    """
    task_id = str(uuid5(NAMESPACE, what))
    try:
        signature.clone(args=(result,), task_id=task_id).apply_async(**options)
    except Exception as exc:  # the broker's library may raise any exception
        raise NotDispatched(f"{what.split()[0]} could not be sent: {error_site(exc)}") from exc
