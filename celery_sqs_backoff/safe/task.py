"""The task base classes, with guards, steps, locks and workflows on top of ``task``."""

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
    """A Celery task that fails well on Amazon SQS, with guards, steps, locks and idempotency keys.

    Guards, steps and locks are recorded in the store that ``app.conf.sqs_backoff["store"]`` names.
    Without a ``scope`` the record belongs to this **message**, that is the task's name and the
    Celery task ID, which stays the same when SQS delivers the message again, when the task is
    retried, and when the message is redriven. Two messages that mean the same work have two IDs;
    a shared record needs a ``scope`` that both name, such as ``"order:7"``.

    Options in addition to the ones of ``BackoffTask``:

    * ``guard``: a ``Guard(key=..., window=...)``: at most one message per key and window gets to
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
        """Do a step unless it is recorded as done, and return its result.

        The result is recorded when ``fn(*args, **kwargs)`` has returned, and kept for 30 days. If
        the process ends between the two, the next run does the step again: let ``fn`` pass
        :meth:`idempotency_key` to the provider. Steps with an ``undo`` belong into a
        workflow.

        Arguments:
            name: of the step, once per run: ``"charge"``, ``f"release {funding.pk}"``.
            fn: returns JSON (dates, decimals and UUIDs included). Not async.
            confirm: signature of the task that confirms it, sent once the step is recorded, with
                the step's result as first argument, under the same task ID each time.
            scope: owner of the step: text, an int or a UUID. Default: this message.

        Raises:
            whatever ``fn`` raises. A step that certainly had no effect is forgotten.
            NotDispatched: ``confirm`` could not be sent. Retried; the next run sends it.
            StepNotRecorded: the step was done and not recorded. Not retried.
            OtherInput: the step was begun with other arguments.
            StoreInTransaction: a Django transaction is open. The step has not begun.
            StoreUnavailable: the step has not begun. The task is retried.
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

        When another run holds the lock, or is in the workflow of that name, the task is retried:
        take locks before you do anything that must not be done twice. The lock ends with the block,
        or after ``lease`` (seconds or timedelta; default 300 s), unless the block calls its
        ``renew()``.

        Raises:
            Busy: (on entering) another run holds it.
            HeldByItself: (on entering) this run holds it.
            StoreInTransaction: (on entering) a Django transaction is open.
        """
        state = current()
        held = None if state is None else state.held
        with Lock(self._records, key, lease=lease, held=held) as lock:
            yield lock

    @contextmanager
    def guarded(self, key: object, *, window: float | timedelta) -> Iterator[None]:
        """Guard a part of the task, or guard by a key that the task must look up first.

        If the block fails before anything can have been processed, and no step of it was done,
        another message may pass. The same message passes again, also after the block has ended
        well. Outside a message it has no effect.

        Raises:
            Refused: (on entering) another message has passed. It ends the task, quietly.
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

        It needs no store.

        Arguments:
            name: one per call that the task makes: text, an int or a UUID.
            scope: owner of the call, likewise. Default: this message.
            version: raise it when the provider has refused the request itself, and the input was
                corrected. Never after a timeout: the first call may have worked.

        Raises:
            OutsideRun: no ``scope``, and the task is not running for a message.
        """
        return names.idempotency_key(namespace_of(self.app), self._scope(scope), name, version)

    def on_replace(self, sig: Signature) -> Any:
        """Send the task that goes on for this one, as Celery does. It has the callbacks now."""
        try:
            return super().on_replace(sig)
        except Ignore:
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
        """Return whether the verdict on the exception says that it had no effect."""
        return isinstance(exc, Exception) and bool(self._judge(exc).nothing_was_processed)


class WorkflowTask(SQSBackoffTask):
    """A task that enters workflows. When its message is given up, their steps are taken back."""

    abstract = True
    has_workflows = True

    @classmethod
    def on_bound(cls, app: Any) -> None:
        super().on_bound(app)
        register(app, SQSBackoffTask)

    def workflow(
        self, scope: object, *, lease: float | timedelta = DEFAULT_LEASE_SECONDS
    ) -> Workflow:
        """Enter ``with self.workflow(f"order:{order_id}") as order:`` for steps under one lock.

        ``order.step(...)`` does a step and renews the lock first; ``order.key("release")`` is an
        idempotency key. The message that last began a step answers for the workflow: if that
        message is given up, in whichever way, while the block has not ended well, each step's
        ``undo`` task is sent, the last step's first, each after the one before it has ended well.
        If its process was killed inside the block, that waits until the lease is over, because
        a dead process looks like one in the middle of a step.

        Arguments:
            scope: of the business object: text, an int or a UUID.
            lease: seconds or timedelta above 0; longer than any one step takes, because each step
                starts it again. A killed process holds the workflow until then. Default 300.

        Raises:
            Busy: (on entering) another run holds the lock of that name. The task is retried.
            HeldByItself: (on entering) this run holds it: pass the workflow on instead.
            Compensated: (on entering) the workflow's steps were taken back.
            StoreInTransaction: (on entering) a Django transaction is open.
            ImproperlyConfigured: the store is shared, and records are not signed.
            RuntimeError: the message that is running is of a task without workflows, so the
                steps would never be taken back.
        """
        records, state = self._records, current()
        require_signed(self.app)
        if state is not None and not state.task.has_workflows:
            raise RuntimeError(
                f"{state.task.name} is not based on WorkflowTask, so nobody would take the steps of"
                f" the workflow {scope!r} back: base it on WorkflowTask"
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
