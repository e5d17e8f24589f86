"""Do the steps of a workflow under the lock of its business object."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

from celery.canvas import Signature
from celery.exceptions import Ignore

from ..store.protocol import KEEP_SECONDS
from ..store.records import Records
from .document import Document
from .lock import DEFAULT_LEASE_SECONDS, Lock
from .names import idempotency_key, text_of
from .run import RunState

if TYPE_CHECKING:
    from typing_extensions import Self


class Workflow:
    """The object ``order`` in ``with self.workflow("order:7") as order:``.

    Arguments:
        scope: name of the business object.
        state: facts about the run that enters.
        message: digest of the message that enters; ``None`` = a call outside any message.
        namespace: namespace of the idempotency keys.
        lease: seconds or timedelta; longer than any one step takes.
        is_certain: returns whether an exception proves that the step had no effect.
    """

    def __init__(
        self,
        records: Records,
        scope: object,
        state: RunState,
        *,
        message: str | None,
        namespace: str = "",
        lease: float | timedelta = DEFAULT_LEASE_SECONDS,
        is_certain: Callable[[BaseException], bool] = lambda _: False,
    ) -> None:
        self._scope = text_of("scope", scope)
        self._records, self._message, self._run = records, message, state.run
        self._namespace = namespace
        self._lock = Lock(records, self._scope, lease=lease, held=state.held)
        self._document = Document(
            records,
            "scope",
            self._scope,
            state=state,
            message=message,
            is_certain=is_certain,
            before=self._lock.renew,
        )
        self._is_inside = False

    def step(
        self,
        name: object,
        fn: Callable[..., Any],
        *args: Any,
        undo: Signature | None = None,
        confirm: Signature | None = None,
        **kwargs: Any,
    ) -> Any:
        """Renew the lock, do a step unless it is recorded as done, and return its result.

        Arguments:
            name: name of the step, unique in the workflow: ``"account"``,
                ``f"release {funding.pk}"``.
            fn: is called with ``args`` and ``kwargs``. Returns JSON (dates, decimals and UUIDs
                included).
            undo: signature of the task that undoes the step when the message is given up. The
                task's first argument is the step's result, or ``None`` if it is unknown whether the
                step had an effect. Default: the step is not undone.
            confirm: signature of a task that is sent after the step is recorded, with the step's
                result as first argument. Default: no task.

        Raises:
            Exception: the exception that ``fn`` raised. If it proves that the step had no effect,
                and only this run has begun the step, the step counts as not begun. Otherwise it
                stays begun. In both cases the next run does the step again.
            LockLost: the lease ended before the step, or another run has entered the workflow. If
                the other run entered during the step, the step was done, but not recorded.
            NotDispatched: ``confirm`` could not be sent. The task is retried, and the next run
                sends it.
            StepNotRecorded: the step was done, but not recorded. The task is not retried.
            OtherInput: an earlier run has begun the step with other arguments.
            RuntimeError: the call is outside the ``with`` block.
        """
        if not self._is_inside:
            raise RuntimeError(f"the step {name!r} is outside its workflow's with block")
        return self._document.step(name, fn, args, kwargs, undo=undo, confirm=confirm)

    def key(self, name: object) -> str:
        """Return a UUID for a provider's idempotency header, the same on every attempt."""
        version = self._document.fields.get("versions", {}).get(text_of("name", name), 1)
        return idempotency_key(self._namespace, f"scope:{self._scope}", name, version)

    def __enter__(self) -> Self:
        self._lock.acquire()
        try:
            if self._message is not None:
                _list_scope(self._records, self._message, self._scope, self._run)
            self._document.enter()
        except BaseException:  # Otherwise the lock would stay taken until its lease ends.
            self._lock.release()
            raise
        self._is_inside = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_inside = False
        try:
            if exc is None or isinstance(exc, Ignore):
                self._document.end()
        finally:
            self._lock.release()


def _list_scope(records: Records, message: str, scope: str, run: str) -> None:
    """Record that the message has entered a workflow, so that the workflow can be undone."""
    # The run's ID makes the records of two runs differ. If they were equal, ``Records`` would take
    # an earlier run's record for a new record, and would not extend its time to live.
    mine = {"scopes": [scope], "run": run}

    def join(there: dict[str, Any]) -> dict[str, Any]:
        return {"scopes": [*(each for each in there["scopes"] if each != scope), scope], "run": run}

    records.update("message", message, mine, KEEP_SECONDS, join)


def scopes_of(records: Records, message: str) -> list[str]:
    """Return the names of the workflows that a message has entered."""
    there = records.get("message", message)
    return [] if there is None else list(there.fields["scopes"])
