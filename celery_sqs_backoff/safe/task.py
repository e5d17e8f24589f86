"""The public task base classes, which add guards, steps, locks and workflows to ``BackoffTask``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar
from uuid import uuid4

from celery.canvas import Signature
from celery.exceptions import Ignore, ImproperlyConfigured

from ..contrib.django.outbox import OnCommit
from ..store.protocol import seconds_kept
from ..store.records import Records
from ..store.settings import namespace_of, records_of, require_signed, require_store
from ..task.base import BackoffTask
from . import names
from .document import Document
from .guard import Guard, release
from .hooks import SafeExtension, attempt, message_digest, pass_guard, signature_of
from .lock import DEFAULT_LEASE_SECONDS, Lock
from .names import text_of
from .run import RunState, current, message_of
from .take_back import register
from .workflow import Workflow


class SQSBackoffTask(OnCommit, BackoffTask):
    """A Celery task that keeps its message when it fails, and has guards, steps and locks.

    The records of guards, steps and locks are in the store that ``app.conf.sqs_backoff["store"]``
    names. A step or an idempotency key without a ``scope`` belongs to the **message**, which the
    task's name and the Celery task ID identify. Name and ID stay the same when SQS delivers the
    message again, when the task is retried, and when the message is redriven. Two calls of
    ``delay()`` make two messages, even for the same work. To share a step or a key, the tasks of
    both messages must name the same ``scope``, such as ``"order:7"``.

    Options in addition to the options of ``BackoffTask``:

    * ``guard``: a ``Guard(key=..., window=...)`` that lets at most one message per key and window
      run. Default ``None``. Needs a store (``app.conf.sqs_backoff["store"]``).
    """

    abstract = True
    guard: Guard | None = None
    has_workflows: ClassVar[bool] = False
    extension = SafeExtension()

    @classmethod
    def _check_options(cls, app: Any) -> None:
        guard: object = cls.guard
        if guard is None:
            return
        if not isinstance(guard, Guard):
            raise ImproperlyConfigured(
                f"invalid guard {guard!r}: expected a Guard(key=..., window=...), or None"
            )
        require_store(app)
        guard.check(signature_of(cls))

    def step(
        self,
        name: object,
        fn: Callable[..., Any],
        *args: Any,
        confirm: Signature | None = None,
        scope: object = None,
        **kwargs: Any,
    ) -> Any:
        """Do a step, unless it is recorded as done. Return its result.

        The result is recorded when ``fn(*args, **kwargs)`` has returned, and kept for 30 days. If
        the process dies after the call, but before the result is recorded, the next run does the
        step again. So let ``fn`` pass :meth:`idempotency_key` to the provider. For steps with an
        ``undo`` use a workflow.

        Arguments:
            name: name of the step, unique in a run: ``"charge"``, ``f"release {funding.pk}"``.
            fn: the function to call. It returns JSON (dates, decimals and UUIDs included), and
                is not async.
            confirm: signature of a task that is sent after the step is recorded, with the step's
                result as first argument. If the task is sent again, it has the same task ID.
                Default: no task.
            scope: owner of the step: text, an int or a UUID. Default: this message.

        Raises:
            Exception: the exception that ``fn`` raised. If it proves that the step had no effect,
                and only this run has begun the step, the record of the step is removed.
            NotDispatched: ``confirm`` could not be sent. The task is retried, and the next run
                sends it.
            StepNotRecorded: the step was done, but not recorded. The task is not retried.
            OtherInput: an earlier run has begun the step with other arguments.
            OutsideRun: no ``scope``, and the task is not running for a message.
            StoreInTransaction: a Django transaction is open. The step has not begun.
            StoreUnavailable: the store did not answer, before the step has begun or after it was
                recorded. The task is retried.
            TypeError, ValueError: an argument is invalid, or this run has already done a step of
                this name.
        """
        document = Document(
            self._records,
            "steps",
            self._scope(scope),
            state=current(),
            is_certain=self._is_certainly_not_processed,
        )
        return document.step(name, fn, args, kwargs, confirm=confirm)

    @contextmanager
    def exclusive(
        self, key: object, *, lease: float | timedelta = DEFAULT_LEASE_SECONDS
    ) -> Iterator[Lock]:
        """Let one run at a time enter ``with self.exclusive("account:7"):``, on all machines.

        If another run holds the lock, or is in the workflow of the same name, the task is retried,
        and does all that comes before the lock again. So take locks before you do anything that
        must not be done twice. The lock ends with the block, or earlier, after ``lease``. In a
        block that takes longer than ``lease``, call ``renew()`` of the lock.

        Arguments:
            key: name of the lock: text, an int or a UUID.
            lease: seconds or timedelta above 0. Default 300 s.

        Raises:
            Busy: (on entering) another run holds the lock.
            HeldByItself: (on entering) this run already holds the lock.
            StoreInTransaction: (on entering) a Django transaction is open.
        """
        state = current()
        held = None if state is None else state.held
        with Lock(self._records, key, lease=lease, held=held) as lock:
            yield lock

    @contextmanager
    def guarded(self, key: object, *, window: float | timedelta) -> Iterator[None]:
        """Let one message per key and window run the block ``with self.guarded(...):``.

        Use it to guard a part of the task, or if the task must look up the key first. The same
        message passes again, even after the block has succeeded. Another message can pass after the
        window, or earlier if the block has failed without effect. The block had no effect if all of
        these are true: its exception is RETRYABLE or NOT_PROCESSED, no step in the block was done,
        and no earlier run of the message had passed. If the task is not running for a message, the
        block runs without a guard.

        Arguments:
            key: key of the guard: text, an int or a UUID.
            window: seconds or timedelta above 0, from the first time the message passed.

        Raises:
            Refused: (on entering) another message has passed. This error ends the task without a
                failure.
        """
        seconds, text, state = seconds_kept("window", window), text_of("guard key", key), current()
        if state is None:
            yield
            return
        message = message_digest(self.app, *state.message)
        passage = pass_guard(self, text, message, uuid4().hex, seconds)
        acts = state.acts
        try:
            yield
        except BaseException as exc:
            if self._is_certainly_not_processed(exc) and state.acts == acts:
                attempt(self.app, release, passage)
            raise

    def idempotency_key(self, name: object, *, scope: object = None, version: int = 1) -> str:
        """Return a UUID for a provider's idempotency header, the same on every attempt.

        This method needs no store.

        Arguments:
            name: name of the call, unique in the task: text, an int or a UUID.
            scope: owner of the call: text, an int or a UUID. Default: this message.
            version: default 1. Increase it if the provider has refused the request and you have
                corrected the input. Never increase it after a timeout, because the call may have
                worked.

        Raises:
            OutsideRun: no ``scope``, and the task is not running for a message.
        """
        return names.idempotency_key(namespace_of(self.app), self._scope(scope), name, version)

    def on_replace(self, sig: Signature) -> Any:
        """Send the task that replaces this task, as Celery does, with this task's callbacks."""
        try:
            return super().on_replace(sig)
        except Ignore:
            # The new task has the callbacks now. So ``SafeExtension.run_failed`` must send none.
            self.request.callbacks = None
            raise

    @property
    def _records(self) -> Records:
        return records_of(self.app)

    def _scope(self, scope: object) -> str:
        if scope is not None:
            return f"scope:{text_of('scope', scope)}"
        name, task_id = message_of(self)
        return f"task:{name}:{task_id}"

    def _is_certainly_not_processed(self, exc: BaseException) -> bool:
        """Return whether the verdict on the exception says that the work was not processed."""
        return isinstance(exc, Exception) and bool(self._judge(exc).nothing_was_processed)


class WorkflowTask(SQSBackoffTask):
    """A task with workflows. When the worker gives its message up, the workflows are undone."""

    abstract = True
    has_workflows = True

    @classmethod
    def on_bound(cls, app: Any) -> None:
        super().on_bound(app)
        register(app, SQSBackoffTask)

    def workflow(
        self, scope: object, *, lease: float | timedelta = DEFAULT_LEASE_SECONDS
    ) -> Workflow:
        """Return a workflow for ``with self.workflow(f"order:{order_id}") as order:``.

        The block holds the lock of that name, so one run at a time can be in the block.
        ``order.step(...)`` renews the lock and does a step. ``order.key("release")`` returns an
        idempotency key.

        The message that last began a step owns the workflow. If the worker gives that message up,
        the ``undo`` tasks of the steps are sent, the last step's first. Each undo task is sent when
        the undo task before it has succeeded. Once a block has ended without an exception, its
        steps are never undone. A process that was killed inside the block has not freed the lock,
        so after a kill the first undo task is sent only when the lease has ended.

        Arguments:
            scope: name of the business object: text, an int or a UUID.
            lease: seconds or timedelta above 0. Default 300 s. It must be longer than the longest
                step, because the lock is renewed only when a step begins. If the process is killed,
                the lock stays taken until the lease ends.

        Raises:
            Busy: (on entering) another run holds the lock of that name. The task is retried.
            HeldByItself: (on entering) this run already holds the lock. Pass the workflow object
                on instead.
            Compensated: (on entering) the workflow's steps were undone, or are being undone.
            StoreInTransaction: (on entering) a Django transaction is open.
            ImproperlyConfigured: there is no store, or it is shared and records are not signed.
            RuntimeError: the running message belongs to a task that is not based on
                ``WorkflowTask``, so the steps would never be undone.
        """
        records, state = self._records, current()
        require_signed(self.app)
        if state is not None and not state.task.has_workflows:
            raise RuntimeError(
                f"{state.task.name} is not based on WorkflowTask, so the steps of the workflow"
                f" {scope!r} would never be undone: base it on WorkflowTask"
            )
        return Workflow(
            records,
            scope,
            state or RunState(),
            message=None if state is None else message_digest(self.app, *state.message),
            namespace=namespace_of(self.app),
            lease=lease,
            is_certain=self._is_certainly_not_processed,
        )
