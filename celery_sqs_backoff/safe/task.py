"""The methods of a task that make its retry safe."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from inspect import getattr_static
from typing import Any
from uuid import uuid4

from celery.canvas import Signature
from celery.exceptions import ImproperlyConfigured, Retry
from celery.utils.log import get_task_logger

from ..outcomes import Outcome
from . import keys
from .commit import after_commit
from .errors import SafeError, TryLater
from .guard import Guard, check_and_set, unset
from .lock import DEFAULT_LEASE_SECONDS, Lock
from .steps import Steps
from .store import Store
from .stores import has_store, store_of

__all__ = ["SafeTask"]

logger = get_task_logger(__name__)


class SafeTask:
    """What a task of ours can do beside failing well. To be mixed into a ``celery.Task``.

    All of it is recorded in the store that ``app.conf.sqs_backoff["store"]`` names, and, where no
    ``scope`` is given, under the **Celery task id**: it is the same when SQS delivers the message
    again, when the task is retried, and when the message is redriven from the dead-letter queue,
    which gives it a new SQS message id. Two messages that mean the same work have two task ids;
    what they are to share needs a ``scope`` that both name, such as ``"order:7"``.

    Called as a function, a task has no id: each call is on its own.
    """

    guard: Guard | None = None

    # What Celery's Task gives.
    app: Any
    request: Any
    delay: Callable[..., Any]
    apply_async: Callable[..., Any]

    def step(
        self,
        name: str,
        fn: Callable[..., Any],
        *args: Any,
        undo: Signature | None = None,
        confirm: Signature | None = None,
        scope: str | None = None,
    ) -> Any:
        """Do a step of a workflow, unless it is recorded as done; return its result.

        The result is recorded when ``fn(*args)`` has returned, and kept for 30 days. If the process
        ends between the two, the next run does the step again: let ``fn`` pass
        :meth:`idempotency_key` to the provider.

        Arguments:
            name: of the step, once per workflow: ``"account"``, ``f"release {funding.pk}"``.
            fn: returns what JSON can hold (dates, decimals and UUIDs included). The first run
                gets the result through JSON too, so a tuple is a list.
            undo: signature of the one task that takes the step's outside effect back, sent by
                :meth:`compensate`.
            confirm: signature of the task that confirms it, sent once the step is recorded.
                Both get the step's result as first argument, unless they are immutable (``.si``).
                They are sent after the commit of an open Django transaction, at least once, under
                the same task id each time.
            scope: what the step belongs to. Default: this message.

        Raises:
            whatever ``fn`` raises; then nothing is recorded.
            NotDispatched: ``confirm`` could not be sent. The task is retried; the next run sends
                it.
            StepNotRecorded: the step was done and not recorded. Not retried.
            Compensated: the step has been taken back.
            ValueError: this run has had a step of this name, whose result the second would get.
            TypeError: ``undo`` or ``confirm`` is not the signature of one task (a chain, a group),
                or has arguments that JSON cannot hold.
            StoreUnavailable: nothing has been done. The task is retried.
        """
        self._refuse_second_use(name, scope)
        result = self._steps(scope).run(name, fn, args, undo=undo, confirm=confirm)
        self._steps_of_run.add((scope, name))
        return result

    def compensate(self, *, scope: str | None = None) -> None:
        """Send the ``undo`` of every step that was done, the last first; then raise, or return.

        They are tasks like any other, with retries of their own, so they may run in any order.
        Called again, it sends what has not been sent. A step that was taken back is not done again:
        its workflow is over.

        Raises:
            NotDispatched: a task could not be sent. The next run's first step sends the rest.
        """
        self._steps(scope).compensate()

    def exclusive(self, key: str, *, lease: float = DEFAULT_LEASE_SECONDS) -> Lock:
        """``with self.exclusive("account:7"):`` one run at a time, on all machines.

        When another run holds it, the task is retried a little later, which does not count as a
        retry. It holds the lock until the block ends, or for ``lease`` seconds (default 300): a
        longer block calls ``renew()`` on what the ``with`` gives.

        Raises:
            Busy: (on entering) another run holds it.
        """
        return Lock(self._store, key, lease=lease)

    @contextmanager
    def guarded(self, key: str, *, window: float) -> Iterator[None]:
        """The option ``guard`` for a part of the task, or for a key that it must look up first.

        If the block fails such that nothing can have been processed, the record is taken back.

        Raises:
            Refused: (on entering) another message has passed. It ends the task, quietly.
        """
        guard = Guard(key=lambda: key, window=window)
        check_and_set(self._store, key, self._identity, guard.window)
        try:
            yield
        except BaseException as exc:
            if self._is_certainly_not_processed(exc):
                self._unset(key)
            raise

    def idempotency_key(self, name: str = "", *, scope: str | None = None) -> str:
        """Return a UUID for a provider's idempotency header: the same on every attempt.

        Arguments:
            name: one per call that the task makes.
            scope: what the call belongs to. Default: this message.

        Providers forget keys, often after 24 hours, and retries can last longer: a step, or a
        guard, must keep the call from being made again after that.
        """
        scope = self._scope(scope)
        version = keys.version(self._store, scope, name) if has_store(self.app) else 1
        return keys.idempotency_key(scope, name, version)

    def renew_idempotency_key(self, name: str = "", *, scope: str | None = None) -> str:
        """Return a new key, in force from now on, for this message's later attempts too.

        For a provider that has refused the request itself, and would answer the same to the same
        key. Never after a timeout: the call may have succeeded under the old key.
        """
        scope = self._scope(scope)
        return keys.idempotency_key(scope, name, keys.renew(self._store, scope, name))

    def delay_on_commit(self, *args: Any, **kwargs: Any) -> None:
        """``delay``, once no Django transaction is open; never, if it is rolled back."""
        after_commit(partial(self.delay, *args, **kwargs))

    def apply_async_on_commit(self, *args: Any, **kwargs: Any) -> None:
        """``apply_async``, once no Django transaction is open; never, if it is rolled back."""
        after_commit(partial(self.apply_async, *args, **kwargs))

    # Where the task's own machinery calls in

    @classmethod
    def _check_guard(cls) -> None:
        """When the task is bound to its app: refuse a guard that could not work."""
        guard: object = cls.guard
        if guard is None:
            return
        if not isinstance(guard, Guard):
            raise ImproperlyConfigured(
                f"guard={guard!r} is not legal: it must be a Guard(key=..., window=...), or None"
            )
        guard.check(_signature_of(cls))

    def _pass_guard(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Before the run. Raises Refused, or StoreUnavailable."""
        if self.guard is not None and not self.request.called_directly:
            key = self.guard.key_for(_signature_of(type(self)), args, kwargs)
            check_and_set(self._store, key, self._identity, self.guard.window)

    def _unset_guard(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """With ``undo``: nothing can have been processed. Does not raise."""
        if self.guard is not None and not self.request.called_directly:
            try:
                key = self.guard.key_for(_signature_of(type(self)), args, kwargs)
            except Exception:
                # The project's code; if it failed before the run too, that is being handled.
                logger.exception("sqs_backoff.guard_not_unset")
            else:
                self._unset(key)

    def _unset(self, key: str) -> None:
        try:
            unset(self._store, key, self._identity)
        except SafeError:  # it is away, or the task has left a transaction open
            # The record ends with its window; until then it lets this message pass, and no other.
            logger.exception("sqs_backoff.guard_not_unset")

    def _is_certainly_not_processed(self, exc: BaseException) -> bool:
        if isinstance(exc, Retry):  # by self.retry(): the task says so itself
            return True
        if isinstance(exc, TryLater) or not isinstance(exc, Exception):
            return False
        judge: Callable[[Exception], Any] = getattr(self, "_judge")  # noqa: B009  # its host's
        return judge(exc).outcome is not Outcome.UNKNOWN

    def _refuse_second_use(self, name: str, scope: str | None) -> None:
        """A loop whose steps all have one name would do the first, and skip the others."""
        if (scope, name) in self._steps_of_run:
            raise ValueError(
                f"name={name!r} is not legal: this run has had a step of that name; give each its"
                " own, such as f'release {funding.pk}'"
            )

    @property
    def _steps_of_run(self) -> set[tuple[str | None, str]]:
        """The steps that this run is through with."""
        request = self.request
        if request.id is None:  # no message's: nobody says where a run ends, and another begins
            return set()
        if not hasattr(request, "sqs_steps"):
            request.sqs_steps = set()
        steps: set[tuple[str | None, str]] = request.sqs_steps
        return steps

    def _steps(self, scope: str | None) -> Steps:
        return Steps(self._store, self._scope(scope), self.app)

    def _scope(self, scope: str | None) -> str:
        return f"task:{self._identity}" if scope is None else f"scope:{scope}"

    @property
    def _store(self) -> Store:
        return store_of(self.app)

    @property
    def _identity(self) -> str:
        """Who asks: the Celery task id."""
        request = self.request
        if request.id is None:  # called as a function
            if not hasattr(request, "sqs_identity"):
                request.sqs_identity = f"direct:{uuid4()}"
            return str(request.sqs_identity)
        return str(request.id)


def _signature_of(cls: type[SafeTask]) -> inspect.Signature:
    """The arguments of a task, without ``self``."""
    run = getattr_static(cls, "__wrapped__", None)  # what @app.task was given
    if run is None:
        run = getattr_static(cls, "run")
        run = run if isinstance(run, staticmethod) else inspect.unwrap(run)
    if isinstance(run, staticmethod):
        return inspect.signature(run.__func__)
    signature = inspect.signature(run)
    return signature.replace(parameters=list(signature.parameters.values())[1:])
