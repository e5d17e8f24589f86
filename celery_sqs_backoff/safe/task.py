"""The methods of a task that make its retry safe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

from celery.canvas import Signature
from celery.exceptions import ImproperlyConfigured
from celery.utils.log import get_task_logger

from ..store.protocol import seconds_kept
from ..store.settings import namespace_of
from ..store.urls import has_store
from . import keys
from .errors import StoreLost, StoreUnavailable
from .guard import Run, enter
from .hooks import Hooks
from .identity import (
    acts_of,
    carrier_of,
    has_ended,
    is_in_a_message,
    message_of,
    note_act,
    run_id_of,
)
from .lock import DEFAULT_LEASE_SECONDS, Lock, refuse_lock_in_transaction
from .names import text_of
from .steps import Steps
from .workflow import Workflow, refuse_second_use

__all__ = ["SafeTask"]

logger = get_task_logger(__name__)


class SafeTask(Hooks):
    """Mixin for a ``celery.Task`` that adds guards, workflows, steps, locks and idempotency keys.

    All of it is recorded in the store that ``app.conf.sqs_backoff["store"]`` names. Where no
    ``scope`` is given, the record belongs to this **message**: the task's name and the Celery task
    id. That id stays the same when SQS delivers the message again, when the task is retried, and
    when the message is redriven from the dead-letter queue, which gives it a new SQS message id.
    Two messages that mean the same work have two task ids; what they share needs a ``scope`` that
    both name, such as ``"order:7"``.

    Called as a function, a task has no id: each call is on its own. Called as a function inside
    another task's run, it belongs to that run's message.
    """

    def workflow(
        self, scope: object, *, lease: float | timedelta = DEFAULT_LEASE_SECONDS
    ) -> Workflow:
        """``with self.workflow(f"order:{order_id}") as order:`` steps under one lock.

        ``order.step(...)`` does a step as :meth:`step` does, and renews the lock first;
        ``order.key("release")`` is an idempotency key of the same scope. When the message is given
        up, in whichever way, while the block has not ended well, the steps' ``undo`` tasks are
        sent as one chain: the last step's first, each after the one before it has ended well. A
        step that is in doubt gets its ``undo`` too, with ``None`` as its result.

        Arguments:
            scope: of the business process: text, an int or a UUID.
            lease: seconds or timedelta above 0; longer than any one step takes. Default 300.

        Raises:
            Busy: (on entering) another run is in the workflow. The task is retried a little later.
            Compensated: (on entering) the workflow has been taken back.
            StoreInTransaction: (on entering) a Django transaction is open.
            ImproperlyConfigured: the store is shared, and records are not signed.
        """
        vault, where = self._vault, f"scope:{text_of('scope', scope)}"
        if not vault.is_trusted:
            raise ImproperlyConfigured(
                "A workflow on a shared store needs signed records, because they say which task"
                " takes a step back: set sqs_backoff['secret'] to a long random text"
            )
        type(self).enters_workflows = True
        run, opened = _worker_on_workflows(self)
        workflow = Workflow(
            vault,
            where,
            self.app,
            run,
            lease=lease,
            namespace=namespace_of(self.app),
            is_certain=self._is_certainly_not_processed,
            note_act=partial(note_act, self),
            used=opened[where].used if where in opened else set(),
        )
        opened[where] = workflow
        return workflow

    def step(
        self,
        name: str,
        fn: Callable[..., Any],
        *args: Any,
        undo: Signature | None = None,
        confirm: Signature | None = None,
        scope: object = None,
        **kwargs: Any,
    ) -> Any:
        """Do a step of a workflow, unless it is recorded as done; return its result.

        The result is recorded when ``fn(*args, **kwargs)`` has returned, and kept for 30 days. If
        the process ends between the two, the next run does the step again: let ``fn`` pass
        :meth:`idempotency_key` to the provider.

        Arguments:
            name: of the step, once per workflow: ``"account"``, ``f"release {funding.pk}"``.
            fn: returns what JSON can hold (dates, decimals and UUIDs included). The first run
                gets the result through JSON too, so a tuple is a list. Not an async function.
            undo: signature of the one task that takes the step's outside effect back, sent by
                :meth:`compensate`. Its first argument is ``None`` if it is not known whether the
                step was done.
            confirm: signature of the task that confirms it, sent once the step is recorded.
                Both get the step's result as first argument, unless they are immutable (``.si``).
                They are sent at least once, under the same task id each time.
            scope: what the step belongs to: text, an int or a UUID. Default: this message.

        Raises:
            whatever ``fn`` raises. A step that certainly did nothing is forgotten; any other is in
                doubt until it is done.
            NotDispatched: ``confirm`` could not be sent. Retried; the next run sends it.
            StepNotRecorded: the step was done and not recorded. Not retried.
            Compensated: the steps of this scope have been taken back.
            OtherInput: the step was begun with other arguments.
            StoreInTransaction: a Django transaction is open; nothing has been done.
            ValueError: this run has had a step of this name, whose result the second would get.
            TypeError: ``undo`` or ``confirm`` is not the signature of one task (a chain, a group),
                or has arguments that JSON cannot hold; or ``fn`` is async.
            StoreUnavailable: nothing has been done. The task is retried.
        """
        names, name = _remembered(self.request, "sqs_steps"), text_of("name", name)
        where = self._scope(scope)
        if (where, name) in names:
            refuse_second_use(name)
        result = self._steps(where).do(name, fn, args, kwargs, undo=undo, confirm=confirm)
        names[where, name] = True
        return result

    def compensate(self, *, scope: object = None) -> None:
        """Send the ``undo`` of every step that was done or is in doubt; then raise, or return.

        They are sent as one chain, the last step's first: each runs when the one before it has
        ended well. Called again, it sends what has not been sent. A scope that was taken back
        begins no step any more.

        Raises:
            NotDispatched: the tasks could not be sent. The next run's first step sends them.
        """
        self._steps(self._scope(scope)).compensate()

    @contextmanager
    def exclusive(
        self, key: object, *, lease: float | timedelta = DEFAULT_LEASE_SECONDS
    ) -> Iterator[Lock]:
        """``with self.exclusive("account:7"):`` one run at a time, on all machines.

        When another run holds it, the task is retried a little later, which does not count as a
        retry: take locks before you do anything that must not be done twice. The lock ends with
        the block, or after ``lease`` (seconds or timedelta; default 300 s), unless the block calls
        its ``renew()``.

        Raises:
            Busy: (on entering) another run holds it.
            StoreLost: (on entering) the store has gone away since the run began. Not retried.
            StoreInTransaction: (on entering) a Django transaction is open.
        """
        refuse_lock_in_transaction()
        with self._in_the_middle():
            lock = Lock(self._vault, key, lease=lease).acquire()
        try:
            yield lock
        finally:
            lock.release()

    @contextmanager
    def guarded(self, key: object, *, window: float | timedelta) -> Iterator[None]:
        """The option ``guard`` for a part of the task, or for a key that it must look up first.

        If the block fails such that nothing can have been processed, and no step of it has been
        done, the record is taken back. The same message passes again, also after the block has
        ended well: what must not be done again goes into a step. Does nothing when the task is
        called as a function, outside a run.

        Raises:
            Refused: (on entering) another message has passed. It ends the task, quietly.
            StoreLost: (on entering) the store has gone away since the run began. Not retried.
        """
        seconds = seconds_kept("window", window)
        text = text_of("guard key", key)
        if not is_in_a_message(self):
            yield
            return
        with self._in_the_middle():
            passage = enter(self._vault, text, self._run.anew(), seconds)
        before = acts_of(self)
        try:
            yield
        except BaseException as exc:
            if self._is_certainly_not_processed(exc) and acts_of(self) == before:
                self._unset(passage)
            raise

    def idempotency_key(self, name: object, *, scope: object = None) -> str:
        """Return a UUID for a provider's idempotency header: the same on every attempt.

        Arguments:
            name: one per call that the task makes: text, an int or a UUID; ``7`` and ``"7"`` are
                one name.
            scope: what the call belongs to, likewise. Default: this message.

        Providers forget keys, often after 24 hours, and retries can last longer: a step, or a
        guard, must keep the call from being made again after that.

        Raises:
            OutsideRun: no ``scope``, and the task is not running.
        """
        where = self._scope(scope)
        version = keys.version(self._vault, where, name) if has_store(self.app) else 1
        return keys.idempotency_key(namespace_of(self.app), where, name, version)

    def renew_idempotency_key(self, name: object, *, scope: object = None) -> str:
        """Return a new key, in force from now on, for this message's later attempts too.

        For a provider that has refused the request itself, and would answer the same to the same
        key. Never after a timeout: the call may have succeeded under the old key.
        """
        where = self._scope(scope)
        version = keys.renew(self._vault, where, name)
        return keys.idempotency_key(namespace_of(self.app), where, name, version)

    # Whose records

    @contextmanager
    def _in_the_middle(self) -> Iterator[None]:
        """Ask the store in the body of a run, whose work so far must not be repeated."""
        type(self).asks_in_its_body = True
        try:
            yield
        except StoreUnavailable as exc:
            if is_in_a_message(self):
                raise StoreLost("The store went away in the middle of the run") from exc
            raise

    def _steps(self, where: str) -> Steps:
        certain, act = self._is_certainly_not_processed, partial(note_act, self)
        return Steps(self._vault, where, self.app, self._run, is_certain=certain, note_act=act)

    def _scope(self, scope: object) -> str:
        if scope is not None:
            return f"scope:{text_of('scope', scope)}"
        name, message = message_of(self)
        return f"task:{name}:{message}"


def _worker_on_workflows(task: SafeTask) -> tuple[Run, dict[str, Workflow]]:
    """The run that enters a workflow: the message's, if one is being run; and those it has entered.

    A message of a task without our base class is given up by nobody; nor is one whose run has
    ended, whose hooks and old-style ``link_error`` tasks Celery calls then.
    """
    carrier, run, opened = carrier_of(task), task._run, dict[str, Workflow]()
    if carrier is None:
        return replace(run, comes_back=False), opened
    name, request = carrier
    run = Run.of(task._vault, name, str(request.id), run_id_of(request))
    opened = _remembered(request, "sqs_workflows")
    outer: Any = task.app.tasks.get(name)
    if not getattr(outer, "is_covered", False) or has_ended(request):
        return replace(run, comes_back=False), opened
    type(outer).enters_workflows = True
    return run, opened


def _remembered(request: Any, name: str) -> dict[Any, Any]:
    """Return what is remembered for a run under a name; nothing outside a message's run."""
    if request.id is None:  # nobody says where a run ends, and another begins
        return {}
    if not hasattr(request, name):
        setattr(request, name, {})
    remembered: dict[Any, Any] = getattr(request, name)
    return remembered
