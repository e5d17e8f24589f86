"""The task base class: its options, and Celery's methods that it overrides."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from functools import partial
from os.path import exists
from typing import Any, ClassVar, NoReturn

from celery import Task
from celery.exceptions import ImproperlyConfigured
from celery.utils.serialization import raise_with_context
from celery.utils.time import maybe_make_aware

from ..provider.settings import Provider
from ..retry.budget import GiveUpReason, exhausted
from ..retry.options import (
    AUTORETRY_OPTIONS,
    DEAD_LETTER,
    FULL,
    InvalidOption,
    Options,
    options_from_autoretry,
)
from ..retry.outcomes import Classifier
from ..retry.policies import FullJitter, Policy
from ..sqs.eta import delay_seconds
from ..sqs.visibility import longest_delay, standing, visibility_delay
from .binding import (
    REQUEST,
    check_definition,
    is_celerys_own,
    keep_celerys_behaviour,
    name_of,
    overrule_settings,
    setting_name,
)
from .extension import Extension
from .failed_run import Final, judge_failure, publish_copy
from .handover import BackoffRetry, NamedRetry, delivery_of
from .retries import drawn_delay, made, note_cause
from .wrapping import wrap_task, wrap_trace


class BackoffTask(Task):  # type: ignore[misc]  # Celery is not typed
    """A Celery task that fails well on Amazon SQS.

    When it raises an error classified as retryable, the message stays on the queue, hidden by
    SQS's visibility timeout for a delay drawn from ``backoff``; nothing is published, nothing
    sleeps, the message id stays the same. What is not retried goes to the queue's dead-letter
    queue with the reason on it, and its result becomes FAILURE there and then.

    Options (class attributes or keywords of ``@app.task``; app-wide: ``app.conf.sqs_backoff``):

    * ``backoff``: the delay policy. Default ``FullJitter(base=2, cap=3600)``: seconds, uniform over
      0 to 2, 4, 8, ... 3600.
    * ``retry_for``: seconds or timedelta since SQS first delivered the message while it was due.
      After that, no retry is started. Default 36 hours; ``None`` = no limit.
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
    * ``fifo_cap``: seconds or timedelta; the longest delay drawn from ``backoff`` on a FIFO queue,
      where a hidden message holds up its message group. Default 300.
    * ``park_above``: from which share of SQS's 120,000 messages in flight on a message that would
      be hidden goes to the dead-letter queue instead, marked as parked, because at the quota SQS
      hands out nothing more. Default 0.8; ``None`` = never. Not on FIFO queues, whose order it
      would break.
    * ``record_detail``: what the dead-letter record says of the exception: ``"full"`` (default:
      type, message and traceback, credentials masked) or ``"type"``.
    * ``provider``: a :class:`~celery_sqs_backoff.Provider` or its name: while it is down for one
      task, the messages of all its tasks wait without running. ``None`` (default) = none.
    * ``redact``: ``callable(text) -> text``, your own masking of the record's message and
      traceback, called in this process after ours. A text on which it fails is left out.

    ``autoretry_for``, ``dont_autoretry_for``, ``retry_backoff``, ``retry_backoff_max``,
    ``retry_jitter`` and ``retry_kwargs`` are read as the options above; Celery's own mechanism,
    which publishes a copy, is off.

    On another broker, and with ``task_always_eager``, a retry is Celery's own with this task's
    delay; an eager task needs ``max_retries``. Called as a function, it raises what it raises.

    Raises:
        ImproperlyConfigured: when the task is bound to an app with invalid options, or with
            ``acks_late=False``.
    """

    abstract = True
    Request = REQUEST
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
    record_detail: str = FULL
    redact: Callable[[str], str] | None = None
    provider: Provider | str | None = None

    #: The options as validated when the task was bound to its app.
    backoff_options: ClassVar[Options] = Options()

    #: False for Celery's own tasks (``celery.chord_unlock``), which behave as without this class.
    is_covered: ClassVar[bool] = True
    stores_started: ClassVar[bool] = False  # see task/starting.py
    #: What is done around each run.
    extension: ClassVar[Extension] = Extension()

    #: Celery wraps ``run`` for autoretry only where this attribute is missing
    #: (celery/app/autoretry.py): being there is what keeps that mechanism off.
    _orig_run = None

    @classmethod
    def on_bound(cls, app: Any) -> None:
        super().on_bound(app)
        if is_celerys_own(name_of(cls)):
            cls.is_covered = False
            keep_celerys_behaviour(cls, app)
            return
        if not cls.acks_late:
            raise ImproperlyConfigured(
                f"{name_of(cls)}: acks_late=False would delete the message before the task has run;"
                " SQSBackoffTask needs acks_late=True"
            )
        try:
            cls.backoff_options = cls._resolve_options(app)
            cls._check_options(app)
            check_definition(cls, app)
        except (ImproperlyConfigured, InvalidOption) as exc:
            raise ImproperlyConfigured(f"{name_of(cls)}: {exc}") from exc
        cls.max_retries = cls.backoff_options.max_retries
        overrule_settings(cls, app)
        wrap_task(cls)
        app.steps["consumer"].add("celery_sqs_backoff.worker.step:LeaseStep")
        app.steps["worker"].add("celery_sqs_backoff.store.check:StoreStep")

    @classmethod
    def _check_options(cls, app: Any) -> None:
        """Refuse options of a class that is derived from this one.

        Raises:
            ImproperlyConfigured: names the option.
        """

    @property
    def __trace__(self) -> Callable[..., Any] | None:
        """The function by which Celery runs the task. Celery sets it in each worker process."""
        return self.__dict__.get("_sqs_trace")

    @__trace__.setter
    def __trace__(self, trace: Callable[..., Any] | None) -> None:
        self.__dict__["_sqs_trace"] = None if trace is None else wrap_trace(self, trace)

    @__trace__.deleter
    def __trace__(self) -> None:
        self.__dict__.pop("_sqs_trace", None)

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
        allows (12 hours since the receive); otherwise a copy is published at once, as Celery does.
        ``max_retries=0`` means "fail now": no rule of the task's retries what is raised then.

        Raises:
            celery.exceptions.Retry: always, unless ``throw`` is false.
            exc, or MaxRetriesExceededError: no retry is left.
        """
        request, now = self.request, time.time()
        if not self.is_covered or request.called_directly:
            return super().retry(
                args, kwargs, exc, throw, eta, countdown, max_retries=max_retries, **options
            )
        exc = made(exc) if isinstance(exc, type) else exc
        cause = exc if isinstance(exc, BaseException) else sys.exc_info()[1]
        limit = self.max_retries if max_retries is None else max_retries
        if limit is not None and int(request.retries) >= limit:
            _fail_finally(self, exc, GiveUpReason.MAX_RETRIES, cause)
        kind: type[BackoffRetry] = NamedRetry
        if countdown is None and eta is None:
            countdown, kind = drawn_delay(self, request), BackoffRetry
        delivery = delivery_of(request)
        delay = self._seconds_until(eta, now) if countdown is None else countdown
        if (
            delivery is None
            or not throw
            or _is_changed(request, args, kwargs, options)
            or delay > longest_delay(delivery, now=now)
        ):
            given = (args, kwargs, exc, False, eta, countdown)
            publish = partial(super().retry, *given, **options)
            return publish_copy(self, publish, cause, throw=throw)
        reason = exhausted(
            standing(delivery, retries=int(request.retries), now=now),
            max_retries=limit,
            retry_for=self.backoff_options.retry_for,
            delay=delay,
        )
        if reason is not None:
            _fail_finally(self, exc, reason, cause)
        raise note_cause(kind(exc=exc, when=visibility_delay(delay, delivery, now=now)), cause)

    #: To tell whether a task overrides it.
    _base_retry = staticmethod(retry)

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

    @classmethod
    def _resolve_options(cls, app: Any) -> Options:
        if vars(cls).get("_decorated"):
            Options.refuse_misspelt(vars(cls).keys() - {*dir(cls.__bases__[0]), *AUTORETRY_OPTIONS})
        own = {name: getattr(cls, name) for name in Options.names() if _is_set_by_user(cls, name)}
        return Options.resolve(
            app_wide=app.conf.get("sqs_backoff") or {},
            own={**options_from_autoretry(cls), **own},
            setting=setting_name(app),
        )

    #: What a failure of this run means.
    _judge = judge_failure

    def _delay_seconds(self, producer: Any, args: Any, kwargs: Any, options: Any) -> int:
        """How long SQS is to delay a message; 0 where it is not to, or is not the broker."""
        countdown, eta = options.get("countdown"), options.get("eta")
        if (countdown is None and not isinstance(eta, datetime)) or producer is not None:
            return 0
        conf = self.app.conf
        if not str(conf.broker_write_url or conf.broker_url).startswith("sqs:"):
            return 0
        options = {**self._get_exec_options(), **options}
        route = self.app.amqp.router.route(options, self.name, args or (), kwargs or {}, self)
        queue = route.get("queue")
        if str(getattr(queue, "name", queue)).endswith(".fifo"):
            return 0
        return delay_seconds(
            self._seconds_until(eta, time.time()) if countdown is None else countdown
        )

    def _seconds_until(self, eta: datetime | None, now: float) -> float:
        return 0.0 if eta is None else maybe_make_aware(eta, self.app.timezone).timestamp() - now


#: Arguments of a task that cannot be changed in place.
_UNCHANGEABLE = (str, bytes, int, float, type(None))

_OURS = __name__.partition(".")[0] + "."


def _is_set_by_user(cls: type[BackoffTask], name: str) -> bool:
    """Return whether the task, or a base class between it and ours, sets the option."""
    setter = next(c for c in cls.__mro__ if name in vars(c))
    return not (setter.__module__ or "").startswith(_OURS)  # exec() knows no module


def _fail_finally(task: Any, failure: Any, reason: GiveUpReason, cause: Any) -> NoReturn:
    """Raise what ``retry()`` was given, and note that no rule may retry it."""
    request = task.request
    if failure is None:
        failure = task.MaxRetriesExceededError(
            f"Can't retry {task.name}[{request.id}]: {reason.value}",
            task_args=request.args,
            task_kwargs=request.kwargs,
        )
    request.sqs_final = Final(failure, reason, cause)
    raise_with_context(failure)
    raise AssertionError("raise_with_context raises")


def _is_changed(request: Any, args: Any, kwargs: Any, options: Mapping[str, Any]) -> bool:
    """Return whether the message may not hold what ``retry()`` was given.

    A list or dict may have been changed in place, and then that of the request has changed too.
    """
    named = [*(args or ()), *(kwargs or {}).values()]
    if not all(isinstance(value, _UNCHANGEABLE) for value in named):
        return True
    same_args = args is None or list(args) == list(request.args or ())
    same_kwargs = kwargs is None or (
        kwargs is not request.kwargs and dict(kwargs) == dict(request.kwargs or {})
    )
    same_queue = {"queue": (request.delivery_info or {}).get("routing_key")}
    return not (same_args and same_kwargs and (not options or options == same_queue))
