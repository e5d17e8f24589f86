"""Control points: what a workflow has done already, so that a rerun goes on where it stopped.

A step's record says what its function returned, and which of its tasks is still to be sent::

    (no record) --run--> confirm --sent--> done
                   \\----------------------^   (a step without a confirming task)
    confirm, done --compensate--> undo --sent--> undone

A task is sent first, and crossed off afterwards; if the process ends between the two, the next run
sends it again, under the same task id.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from celery.canvas import Signature, maybe_signature
from kombu.utils.json import dumps, loads

from .commit import after_commit
from .errors import Compensated, NotDispatched, StepNotRecorded, StoreUnavailable
from .store import KEEP_SECONDS, Store, key_of, settle

__all__ = ["Steps"]

_CONFIRM, _DONE, _UNDO, _UNDONE = "confirm", "done", "undo", "undone"
_AFTER = {_CONFIRM: _DONE, _UNDO: _UNDONE}


class Steps:
    """The steps of one workflow.

    Arguments:
        scope: what sets this workflow apart from all others.
    """

    def __init__(self, store: Store, scope: str, app: Any) -> None:
        self._store = store
        self._scope = scope
        self._app = app
        self._undoable = key_of("steps", scope)

    def run(
        self,
        name: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        undo: Signature | None,
        confirm: Signature | None,
    ) -> Any:
        """Return what the step has returned before, or do it now. See ``SafeTask.step``."""
        _check("undo", undo)
        _check("confirm", confirm)
        key = self._key(name)
        text = self._store.get(key)
        if text is None:
            if undo is not None:
                self._note_undoable(name)
            text = self._record(key, fn(*args), undo, confirm)
        record = loads(text)
        if record["state"] in (_UNDO, _UNDONE):
            self.compensate()
            raise Compensated("A step of this workflow has been taken back")
        if record["state"] == _CONFIRM:
            self._send(key, text)
        return record["result"]

    def compensate(self) -> None:
        """Send the undoing task of every step that has one, the last step's first, once each."""
        for name in reversed(loads(self._store.get(self._undoable) or "[]")):
            key = self._key(name)
            text = self._store.get(key)
            while text is not None and loads(text)["state"] in (_CONFIRM, _DONE):
                text = self._moved(key, text, loads(text) | {"state": _UNDO})
            if text is not None and loads(text)["state"] == _UNDO:
                self._send(key, text)

    def _record(
        self, key: str, result: object, undo: Signature | None, confirm: Signature | None
    ) -> str:
        try:
            text: str = dumps(
                {
                    "result": result,
                    "state": _DONE if confirm is None else _CONFIRM,
                    _UNDO: self._bound(undo, result, key, _UNDO),
                    _CONFIRM: self._bound(confirm, result, key, _CONFIRM),
                }
            )
            # A copy of the workflow may have been quicker: what it has recorded is what counts.
            return self._store.add(key, text, KEEP_SECONDS) or text
        except (TypeError, ValueError) as exc:
            raise StepNotRecorded(
                "The step was done, but its result is not JSON, so it is not recorded:"
                " let it return text, numbers, lists and dicts"
            ) from exc
        except StoreUnavailable as exc:
            raise StepNotRecorded("The step was done, but the store did not record it") from exc

    @staticmethod
    def _bound(signature: Signature | None, result: object, key: str, what: str) -> Any:
        """Complete a signature as Celery does a callback: the result goes first."""
        if signature is None:
            return None
        # The same id whenever it is sent: what that task derives from its id stays the same too.
        task_id = str(uuid5(NAMESPACE_URL, f"{key}#{what}"))
        return dict(signature.clone(args=(result,), task_id=task_id))

    def _send(self, key: str, text: str) -> None:
        record = loads(text)
        state = record["state"]

        def send() -> None:
            try:
                maybe_signature(record[state], app=self._app).apply_async()
            except Exception as exc:
                # Whatever the broker's library raises.
                raise NotDispatched(f"The step's task to {state} it could not be sent") from exc
            sent = dumps(record | {"state": _AFTER[state]})
            settle(self._store, key, text, sent, KEEP_SECONDS)

        after_commit(send)

    def _moved(self, key: str, text: str, record: dict[str, Any]) -> str | None:
        """Write the record; return what is there now, ours or what somebody was quicker with."""
        new: str = dumps(record)
        return new if settle(self._store, key, text, new, KEEP_SECONDS) else self._store.get(key)

    def _note_undoable(self, name: str) -> None:
        """Before the step is done: what is in the list without a record was never done."""
        while True:
            old = self._store.add(self._undoable, dumps([name]), KEEP_SECONDS)
            if old is None or name in loads(old):
                return
            if settle(self._store, self._undoable, old, dumps([*loads(old), name]), KEEP_SECONDS):
                return

    def _key(self, name: str) -> str:
        return key_of("step", self._scope, name)


def _check(option: str, signature: object) -> None:
    """Refuse what could not be recorded, or sent as is promised, before the step is done."""
    if signature is None:
        return
    # A chain or group would not get the result, nor the same task ids whenever it is sent.
    if not isinstance(signature, Signature) or signature.subtask_type is not None:
        raise TypeError(
            f"{option}: a {type(signature).__name__} is not legal: it must be the signature of one"
            " task, which may start others, or None"
        )
    try:
        dumps(signature)
    except (TypeError, ValueError) as exc:
        raise TypeError(
            f"{option}: a signature with arguments that are not JSON is not legal: {exc}"
        ) from exc
