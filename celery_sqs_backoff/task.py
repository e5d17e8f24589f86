"""The task base class: what happens, in the process that runs a task, when the task fails."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from functools import wraps
from inspect import getattr_static
from os.path import exists
from typing import Any, ClassVar

from billiard.process import current_process
from celery import Task
from celery.exceptions import (
    ImproperlyConfigured,
    Retry,
    TaskPredicate,
    WorkerLostError,
    WorkerShutdown,
    WorkerTerminate,
)
from celery.utils.log import get_task_logger
from celery.utils.serialization import raise_with_context
from celery.utils.time import maybe_make_aware

from .autoretry import AUTORETRY_OPTIONS, options_from_autoretry
from .budget import GiveUpReason, capped, longest_delay, spent, wire_delay
from .delivery import Delivery
from .eta import delay_seconds
from .handover import BackoffRetry, GiveUp, delivery_of, note_give_up
from .options import DEAD_LETTER, Options
from .outcomes import Classifier, Outcome, Verdict, judge
from .policies import FullJitter, Policy
from .safe.errors import Busy, Refused, TryLater
from .safe.shared import busy_receives, count_busy
from .safe.stores import check_store_of
from .safe.task import SafeTask

__all__ = ["SQSBackoffTask"]

logger = get_task_logger(__name__)

#: Delays of a run that found a lock held: the holder is at work, not down.
_BUSY = FullJitter(base=2, cap=30)

#: Header of a retry published to a broker other than SQS: seconds since the epoch of the first
#: failure. There is nothing else by which ``retry_for`` could be kept there.
FIRST_FAILED_AT = "sqs_backoff_first_failed_at"


class SQSBackoffTask(SafeTask, Task):  # type: ignore[misc]  # Celery is not typed
    """A Celery task that fails well on Amazon SQS.

    When it raises an error classified as retryable, the message stays on the queue, hidden by
    SQS's visibility timeout for a delay drawn from ``backoff``; nothing is published, nothing
    sleeps, the message id stays the same. What is not retried goes to the queue's dead-letter
    queue with the reason on it, and its result becomes FAILURE there and then.

    Options (class attributes or keywords of ``@app.task``; app-wide: ``app.conf.sqs_backoff``):

    * ``backoff``: the delay policy. Default ``FullJitter(base=2, cap=3600)``: seconds, uniform over
      0 to 2, 4, 8, ... 3600.
    * ``retry_for``: seconds or timedelta since SQS first handed the message out, after which no
      retry is started. Default 36 hours; ``None`` = no limit.
    * ``max_retries``: as in Celery, but ``None`` (no limit) by default. On SQS it bounds the
      receives of a message, and a receive is not always a run (a prefetched message that a deploy
      gives back has been received).
    * ``retry_on``: exception classes that are RETRYABLE. Default none: unknown errors are not
      retried.
    * ``classify``: callables ``(exc) -> Outcome | Verdict | None``, asked before ``retry_on``.
    * ``undo``: ``callable(task, exc, args, kwargs)``, called in this process when nothing can have
      been processed (RETRYABLE, NOT_PROCESSED), never when it may have been (UNKNOWN).
    * ``on_give_up``: ``"dead-letter"`` (default) or ``"fail"`` (Celery's FAILURE, message deleted).
    * ``crash_budget``: runs that may end in a lost worker process or a hard time limit; with the
      last of them the message is given up. Default 3.
    * ``guard``: a ``Guard(key=..., window=...)``: at most one message per key and window gets to
      run. Default none. Needs a store (``app.conf.sqs_backoff["store"]``).
    * ``fifo_cap``: seconds or timedelta; the longest delay drawn from ``backoff`` on a FIFO queue,
      where a hidden message holds up its message group. Default 300.
    * ``park_above``: from which share of SQS's 120,000 messages in flight on a message that would
      be hidden goes to the dead-letter queue instead, marked as parked, because at the quota SQS
      hands out nothing more. Default 0.8; ``None`` = never. Not on FIFO queues, whose order it
      would break.

    ``autoretry_for``, ``dont_autoretry_for``, ``retry_backoff``, ``retry_backoff_max``,
    ``retry_jitter`` and ``retry_kwargs`` are read as the options above; Celery's own mechanism,
    which publishes a copy, is off.

    On another broker, and with ``task_always_eager``, a retry is Celery's own with this task's
    delay. An eager task without ``max_retries`` is not retried: no time passes there, so nothing
    would end it. Called as a function, the task raises what it raises.

    Raises:
        ImproperlyConfigured: when the task is bound to an app with options that are not legal,
            or with ``acks_late=False``.
    """

    abstract = True
    Request = "celery_sqs_backoff.worker.request:BackoffRequest"
    Strategy = "celery_sqs_backoff.worker.strategy:default"

    acks_late = True
    max_retries: int | None = None

    backoff: Policy = FullJitter(base=2, cap=3600)
    retry_for: float | timedelta | None = timedelta(hours=36)
    retry_on: tuple[type[BaseException], ...] | type[BaseException] = ()
    classify: tuple[Classifier, ...] | Classifier = ()
    undo: Callable[..., object] | None = None
    on_give_up: str = DEAD_LETTER
    crash_budget: int = 3
    fifo_cap: float | timedelta = 300
    park_above: float | None = 0.8

    #: The options as validated when the task was bound to its app.
    backoff_options: ClassVar[Options]

    #: Celery wraps ``run`` for autoretry only where this attribute is missing
    #: (celery/app/autoretry.py): being there is what keeps that mechanism off.
    _orig_run = None

    @classmethod
    def on_bound(cls, app: Any) -> None:
        super().on_bound(app)
        if not cls.acks_late:
            raise ImproperlyConfigured(
                f"{cls.name}: acks_late=False would delete the message before the task has run;"
                " SQSBackoffTask needs acks_late=True"
            )
        own = {name: getattr(cls, name) for name in Options.names() if _is_set_by_user(cls, name)}
        try:
            if vars(cls).get("_decorated"):
                Options.refuse_misspelt(vars(cls).keys() - _CELERYS_OPTIONS)
            cls.backoff_options = Options.resolve(
                app_wide=app.conf.get("sqs_backoff") or {},
                own={**options_from_autoretry(cls), **own},
            )
            check_store_of(app, is_needed=cls.guard is not None)
            cls._check_guard()
        except ImproperlyConfigured as exc:
            raise ImproperlyConfigured(f"{cls.name}: {exc}") from exc
        cls.max_retries = cls.backoff_options.max_retries
        cls.run = _failing_well(cls.run, takes_self=not _is_static(cls, "run"))
        cls.on_failure = _noting_why(cls.on_failure)
        app.steps["consumer"].add("celery_sqs_backoff.worker.step:LeaseStep")

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        **options: Any,
    ) -> Any:
        """Send the task as ``celery.Task.apply_async`` does; a delay is SQS's own, where it can be.

        With ``countdown`` (seconds) or ``eta`` the message gets SQS's ``DelaySeconds``, at most 900
        and not on FIFO queues, which have none. The ETA stays on the message: a worker waits for
        the rest.
        """
        if delay := self._delay_seconds(producer, args, kwargs, options):
            options["DelaySeconds"] = delay
        return super().apply_async(
            args, kwargs, task_id, producer, link, link_error, shadow, **options
        )

    def retry(
        self,
        args: Any = None,
        kwargs: Any = None,
        exc: BaseException | None = None,
        throw: bool = True,
        eta: datetime | None = None,
        countdown: float | None = None,
        max_retries: int | None = None,
        **options: Any,
    ) -> Any:
        """Retry as ``celery.Task.retry`` does, but keep the message where nothing else changes.

        The arguments are Celery's. Without ``countdown`` (seconds) and ``eta`` the delay is drawn
        from ``backoff`` instead of being ``default_retry_delay``. The message is kept, and hidden,
        if arguments and route are as they were, ``throw`` is true, and the delay fits into what SQS
        allows (12 hours since the receive); otherwise a copy is published, as Celery does.

        Raises:
            celery.exceptions.Retry: always, unless ``throw`` is false.
            exc, or MaxRetriesExceededError: no retry is left.
        """
        request = self.request
        if countdown is None and eta is None and not request.called_directly:
            countdown = self._draw_delay(request)
        delivery = delivery_of(request)
        now = time.time()
        delay = self._seconds_until(eta, now) if countdown is None else countdown
        if (
            delivery is None
            or request.called_directly
            or not throw
            or self._is_changed(request, args, kwargs, options)
            or delay > longest_delay(delivery, now=now)
        ):
            return super().retry(
                args, kwargs, exc, throw, eta, countdown, max_retries=max_retries, **options
            )
        limit = self.max_retries if max_retries is None else max_retries
        if reason := self._spent(delivery, request, limit, delay, now):
            failure = exc or self.MaxRetriesExceededError(
                f"Can't retry {self.name}[{request.id}]: {reason.value}"
            )
            request.sqs_no_retry_left = (failure, reason)
            raise_with_context(failure)
        raise BackoffRetry(exc=exc, when=wire_delay(delay, delivery, now=now))

    @property
    def lease_lost(self) -> bool:
        """Whether another worker may be running this message by now.

        To be asked by a long task before an effect that must not happen twice. It becomes true,
        and stays so, when SQS refuses to renew the message's visibility timeout, or could not be
        reached for so long that it has run out. False on other brokers. SQS does not always tell:
        on a standard queue it accepts renewals of a receipt handle that has expired.
        """
        delivery = delivery_of(self.request)
        return delivery is not None and exists(delivery.lost_flag or "")

    def _delay_seconds(self, producer: Any, args: Any, kwargs: Any, options: Any) -> int:
        """How long SQS is to delay a message; 0 where it is not to, or is not the broker."""
        countdown, eta = options.get("countdown"), options.get("eta")
        if (countdown is None and not isinstance(eta, datetime)) or producer is not None:
            return 0
        conf = self.app.conf
        if not str(conf.broker_write_url or conf.broker_url).startswith("sqs:"):
            return 0
        route = self.app.amqp.router.route(dict(options), self.name, args or (), kwargs or {})
        queue = route.get("queue")
        if str(getattr(queue, "name", queue)).endswith(".fifo"):
            return 0
        return delay_seconds(
            self._seconds_until(eta, time.time()) if countdown is None else countdown
        )

    # Failing: everything below runs in the process that ran the task.

    def _instead_of(self, exc: BaseException, args: Any, kwargs: Any) -> BaseException | None:
        """Say what to raise instead of what the task has raised; ``None`` = nothing else."""
        if self.request.called_directly:
            return None
        if isinstance(exc, TaskPredicate):  # Retry, Ignore, Reject: the task's own word
            if isinstance(exc, Retry):
                self._undo(exc.exc or exc, args, kwargs)
            return None
        if isinstance(exc, SystemExit) and not _is_ours_to_leave(exc):
            # In the pools that share the worker's process it would end the worker (solo) or
            # leave the message stuck in it for good (threads, gevent: celery/concurrency/base.py).
            failure: Exception = WorkerLostError(f"The task called sys.exit({exc.code!r})")
            return self._on_error(failure, args, kwargs) or failure
        return self._on_error(exc, args, kwargs) if isinstance(exc, Exception) else None

    def _on_error(self, exc: Exception, args: Any, kwargs: Any) -> Retry | None:
        """Return the retry, or ``None`` if the task has failed; then the request notes why."""
        retry: Retry | GiveUpReason = GiveUpReason.NOT_RETRYABLE
        if isinstance(exc, TryLater):
            outcome, retry = Outcome.RETRYABLE, self._try_later(exc)
        else:
            verdict = self._judge(exc)
            outcome = verdict.outcome
            if outcome is not Outcome.UNKNOWN:
                self._undo(exc, args, kwargs)
            if outcome is Outcome.RETRYABLE:
                retry = self._retry_or_why_not(exc, verdict)
        if not isinstance(retry, GiveUpReason):
            return retry
        self.request.sqs_give_up = GiveUp.because_of(exc, retry, outcome)
        return None

    def _judge(self, exc: Exception) -> Verdict:
        if self._no_retry_left(exc):
            return Verdict(Outcome.RETRYABLE)
        options = self.backoff_options
        return judge(
            exc,
            classify=options.classify,
            retry_on=options.retry_on,
            never_retry=options.never_retry,
        )

    def _no_retry_left(self, exc: Exception) -> GiveUpReason | None:
        """Why ``self.retry()`` has raised this exception, if it has."""
        failure, reason = getattr(self.request, "sqs_no_retry_left", (None, None))
        return reason if failure is exc else None

    def _retry_or_why_not(self, exc: Exception, verdict: Verdict) -> Retry | GiveUpReason:
        if reason := self._no_retry_left(exc):
            return reason
        request, now = self.request, time.time()
        delay = (verdict.retry_after or 0) + self._draw_delay(request)
        delivery = delivery_of(request)
        if delivery is None:
            return self._retry_by_publishing(exc, delay, now)
        if reason := self._spent(delivery, request, self.max_retries, delay, now):
            return reason
        return BackoffRetry(exc=exc, when=wire_delay(delay, delivery, now=now))

    def _try_later(self, exc: TryLater) -> Retry | GiveUpReason:
        """Retry a run that was cut short. One that found a lock held is not counted as a retry."""
        delivery, now = delivery_of(self.request), time.time()
        if not isinstance(exc, Busy):
            return self._retry_or_why_not(exc, Verdict(Outcome.RETRYABLE))
        if delivery is None:
            return self._try_later_by_publishing(exc)
        delay = _BUSY.delay(max(1, count_busy(self.app, delivery.message_id)), random)
        if reason := self._spent(delivery, self.request, None, delay, now):
            return reason
        return BackoffRetry(exc=exc, when=wire_delay(delay, delivery, now=now))

    def _try_later_by_publishing(self, exc: Busy) -> Retry | GiveUpReason:
        """On a broker other than SQS. Eagerly no time passes: it would be busy for ever."""
        request = self.request
        if request.is_eager:
            return GiveUpReason.MAX_RETRIES
        request.retries -= 1  # Celery adds one to what it publishes
        try:
            return super().retry(exc=exc, countdown=_BUSY.delay(1, random), throw=False)
        finally:
            request.retries += 1

    def _retry_by_publishing(
        self, exc: Exception, delay: float, now: float
    ) -> Retry | GiveUpReason:
        """On a broker other than SQS, and eagerly: Celery's own retry."""
        request, retry_for = self.request, self.backoff_options.retry_for
        limit = 0 if request.is_eager and self.max_retries is None else self.max_retries
        if limit is not None and request.retries >= limit:
            return GiveUpReason.MAX_RETRIES
        headers = dict(request.headers or {})
        first_failed_at = headers.setdefault(FIRST_FAILED_AT, now)
        if retry_for is not None and now + delay - first_failed_at >= retry_for:
            return GiveUpReason.RETRY_FOR
        return super().retry(exc=exc, countdown=delay, headers=headers, throw=False)

    def _spent(
        self,
        delivery: Delivery,
        request: Any,
        max_retries: int | None,
        delay: float,
        now: float,
    ) -> GiveUpReason | None:
        return spent(
            delivery,
            retries=self._retries(request),
            max_retries=max_retries,
            retry_for=self.backoff_options.retry_for,
            delay=delay,
            now=now,
        )

    def _retries(self, request: Any) -> int:
        """Retries before this run, without those that found a lock held."""
        delivery, retries = delivery_of(request), int(request.retries)
        if delivery is None or not retries:
            return retries
        if not hasattr(request, "sqs_busy_receives"):
            request.sqs_busy_receives = busy_receives(self.app, delivery.message_id)
        return max(0, retries - int(request.sqs_busy_receives))

    def _draw_delay(self, request: Any) -> float:
        delivery = delivery_of(request)
        message_id = request.id if delivery is None else delivery.message_id
        options, attempt = self.backoff_options, self._retries(request) + 1
        delay = options.backoff.delay_for(message_id, attempt, random)
        if delivery is not None and delivery.is_fifo:
            return capped(delay, options.backoff.ceiling(attempt), options.fifo_cap)
        return delay

    def _undo(self, exc: Exception, args: Any, kwargs: Any) -> None:
        undo = self.backoff_options.undo
        if undo is not None:
            try:
                undo(self, exc, args, kwargs)
            except Exception:
                # The failure that is being handled decides what becomes of the message; an undo
                # that fails too must not turn a retry into a loss.
                logger.exception("sqs_backoff.undo_failed", extra={"task_name": self.name})
        self._unset_guard(args, kwargs)

    def _seconds_until(self, eta: datetime | None, now: float) -> float:
        return 0.0 if eta is None else maybe_make_aware(eta, self.app.timezone).timestamp() - now

    @staticmethod
    def _is_changed(request: Any, args: Any, kwargs: Any, options: Mapping[str, Any]) -> bool:
        same_args = args is None or list(args) == list(request.args or ())
        same_kwargs = kwargs is None or dict(kwargs) == dict(request.kwargs or {})
        same_queue = {"queue": (request.delivery_info or {}).get("routing_key")}
        return not (same_args and same_kwargs and (not options or options == same_queue))


#: What Celery itself makes of keywords of ``@app.task``. (Not ``hasattr``: reading some of the
#: attributes of an unbound task class binds it.)
_CELERYS_OPTIONS = {*dir(SQSBackoffTask), *AUTORETRY_OPTIONS}


def _failing_well(run: Callable[..., Any], *, takes_self: bool) -> Callable[..., Any]:
    """Wrap a task's ``run``, once. (A ``__call__`` would cost every run several times as much.)"""
    if getattr(run, "_is_wrapped", False):
        return run

    @wraps(run)
    def wrapped(self: SQSBackoffTask, /, *args: Any, **kwargs: Any) -> Any:
        try:
            if self.guard is not None:
                self._pass_guard(args, kwargs)
            return run(self, *args, **kwargs) if takes_self else run(*args, **kwargs)
        except Refused as refused:
            if self.request.called_directly:
                raise
            return refused.result
        except BaseException as exc:
            instead = self._instead_of(exc, args, kwargs)
            if instead is None:
                raise
            raise instead from exc

    wrapped._is_wrapped = True  # type: ignore[attr-defined]
    return wrapped


def _noting_why(on_failure: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a task's ``on_failure``, once: the last to see what Celery sends to the main process.

    The task's author may have overridden it without a word to ``super()``.
    """
    if getattr(on_failure, "_is_wrapped", False):
        return on_failure

    @wraps(on_failure)
    def wrapped(
        self: SQSBackoffTask, exc: Any, task_id: Any, args: Any, kwargs: Any, einfo: Any
    ) -> Any:
        if (give_up := getattr(self.request, "sqs_give_up", None)) is not None:
            note_give_up(einfo, give_up)
        return on_failure(self, exc, task_id, args, kwargs, einfo)

    wrapped._is_wrapped = True  # type: ignore[attr-defined]
    return wrapped


def _is_static(cls: type, name: str) -> bool:
    return isinstance(getattr_static(cls, name), staticmethod)


def _is_ours_to_leave(exc: SystemExit) -> bool:
    """Whether the exit is the worker's own, or ends a child process of the prefork pool."""
    is_child: bool = current_process()._parent_pid is not None
    return is_child or isinstance(exc, WorkerShutdown | WorkerTerminate)


def _is_set_by_user(cls: type[SQSBackoffTask], name: str) -> bool:
    """Whether the task, or a base class between it and ours, sets the option."""
    return next(c for c in cls.__mro__ if name in vars(c)) is not SQSBackoffTask
