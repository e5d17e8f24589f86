"""The task base class, its options, and the methods of Celery that it overrides."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from os.path import exists
from types import MethodType
from typing import Any, ClassVar, Final

from celery import Task
from celery.exceptions import ImproperlyConfigured
from celery.utils.imports import symbol_by_name

from ..provider.settings import Provider
from ..provider.tenant import check_key
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
from ..sqs.limits import MAX_DELAY_SECONDS
from .extension import Extension
from .handover import run_of
from .run import judge_failure, retry_task, seconds_until, wrap_task, wrap_trace

_REQUEST: Final = "celery_sqs_backoff.worker.request:BackoffRequest"

#: Task options of Celery that would let a message bypass the limits on its retries, with the values
#: that our tasks use instead. For our tasks only ``retry.decision`` decides about messages.
_OVERRULED: Final[Mapping[str, bool]] = {
    "reject_on_worker_lost": False,
    "retry_on_worker_lost": False,
    "acks_on_failure_or_timeout": True,
    "acks_on_failure": True,
    "acks_on_timeout": True,
}

_OURS: Final = __name__.partition(".")[0] + "."


class BackoffTask(Task):  # type: ignore[misc]  # Celery is not typed
    """A Celery task that retries failures through its own SQS message.

    If the task raises a retryable error, the message stays on the queue. SQS hides it (by the
    visibility timeout) for a delay drawn from ``backoff``. The worker publishes no copy and does
    not sleep, and the message id stays the same. A message that is not retried, or not any more,
    goes to the queue's dead-letter queue with the reason on it. The task's result then becomes
    FAILURE immediately.

    Options (class attributes or keywords of ``@app.task``; app-wide: ``app.conf.sqs_backoff``):

    * ``backoff``: the delay policy. Default ``FullJitter(base=2, cap=3600)``: seconds, uniform over
      0 to 2, 4, 8, ... 3600.
    * ``retry_for``: seconds or timedelta after which no retry starts. The time begins when SQS
      first delivers the message at or after its ETA. Default 36 hours; ``None`` = no limit.
    * ``max_retries``: as in Celery, but ``None`` (no limit) by default. On SQS it limits the
      receives of a message. Not every receive leads to a run, so there may be fewer retries. For
      example, a worker that stops gives back the messages that it has prefetched and not run.
    * ``retry_on``: exception classes that are RETRYABLE. Default ``()``: unknown errors are not
      retried.
    * ``classify``: callables ``(exc) -> Outcome | Verdict | None``, asked before ``retry_on``.
    * ``on_not_processed``: ``callable(task, exc, args, kwargs)``, which undoes what the task has
      prepared, such as a reservation. The task's process calls it if the failed work was certainly
      not processed (RETRYABLE, NOT_PROCESSED), but not if it may have been processed (UNKNOWN).
    * ``on_give_up``: ``"dead-letter"`` (default) or ``"fail"`` (Celery's FAILURE, message deleted).
    * ``crash_budget``: a message is given up after this number of runs that ended by a lost worker
      process, a hard time limit or an abort (such as a ``MemoryError``). Default 3.
    * ``fifo_cap``: seconds or timedelta; the longest delay drawn from ``backoff`` on a FIFO queue,
      where a hidden message holds up its message group. Default 300.
    * ``park_above``: a share of SQS's quota of 120,000 messages in flight. Hidden messages count as
      in flight, and at the quota SQS delivers no further messages. Above the share, a message that
      would be hidden goes to the dead-letter queue instead, marked as parked. Default 0.8;
      ``None`` = never. It does not apply to FIFO queues, because parking would break their order.
    * ``record_detail``: how much of the exception the dead-letter record holds: ``"full"``
      (default: type, message and traceback, credentials masked) or ``"type"``.
    * ``provider``: a :class:`~celery_sqs_backoff.Provider` or its name. While the provider is down,
      the messages of all tasks with this provider wait without running. ``None`` (default) = no
      provider.
    * ``redact``: ``callable(text) -> text``, which masks your secrets in the record's message and
      traceback. The task's process calls it after the built-in masking. If it fails on a text, the
      record omits that text.

    ``autoretry_for``, ``dont_autoretry_for``, ``retry_backoff``, ``retry_backoff_max``,
    ``retry_jitter`` and ``retry_kwargs`` are translated into the options above. Celery's own
    mechanism, which publishes a copy, is off.

    On another broker, and with ``task_always_eager``, the task is retried as in Celery, but with a
    delay from ``backoff``. An eager task is retried only if it has ``max_retries``. A task that is
    called as a function raises its own error.

    Raises:
        ImproperlyConfigured: when the task is bound to an app with invalid options, or with
            ``acks_late=False``.
    """

    abstract = True
    Request = _REQUEST
    Strategy = "celery_sqs_backoff.worker.consume:strategy"

    acks_late = True
    max_retries: int | None = None

    backoff: Policy = FullJitter(base=2, cap=3600)
    retry_for: float | timedelta | None = timedelta(hours=36)
    retry_on: tuple[type[BaseException], ...] | type[BaseException] = ()
    classify: tuple[Classifier, ...] | Classifier = ()
    on_not_processed: Callable[..., object] | None = None
    on_give_up: str = DEAD_LETTER
    crash_budget: int = 3
    fifo_cap: float | timedelta = 300
    park_above: float | None = 0.8
    record_detail: str = FULL
    redact: Callable[[str], str] | None = None
    provider: Provider | str | None = None

    #: The options as validated when the task was bound to its app.
    backoff_options: ClassVar[Options] = Options()

    #: False for Celery's own tasks (``celery.chord_unlock``), which keep Celery's behaviour.
    is_covered: ClassVar[bool] = True
    #: Hooks around each run. Here they do nothing.
    extension: ClassVar[Extension] = Extension()

    #: Celery wraps ``run`` for autoretry only where this attribute is missing
    #: (celery/app/autoretry.py), so defining it keeps that mechanism off.
    _orig_run = None

    @classmethod
    def on_bound(cls, app: Any) -> None:
        super().on_bound(app)
        if _name_of(cls).startswith("celery."):
            cls.is_covered = False
            _keep_celerys_behaviour(cls, app)
            return
        if not cls.acks_late:
            raise ImproperlyConfigured(
                f"{_name_of(cls)}: acks_late=False would delete the message before the task has"
                " run; SQSBackoffTask needs acks_late=True"
            )
        try:
            cls.backoff_options = cls._resolve_options(app)
            cls._check_options(app)
            _check_provider_key(cls)
            _check_request_class(cls, app)
        except (ImproperlyConfigured, InvalidOption) as exc:
            raise ImproperlyConfigured(f"{_name_of(cls)}: {exc}") from exc
        cls.max_retries = cls.backoff_options.max_retries
        if _may_be_sqs(app):
            for name, value in _OVERRULED.items():
                setattr(cls, name, value)
        wrap_task(cls)
        app.steps["consumer"].add("celery_sqs_backoff.worker.step:LeaseStep")
        app.steps["worker"].add("celery_sqs_backoff.store.check:StoreStep")

    @classmethod
    def _check_options(cls, app: Any) -> None:
        """Refuse options that a derived class does not support.

        Raises:
            ImproperlyConfigured: the text names the option.
        """

    @property
    def __trace__(self) -> Callable[..., Any] | None:
        """The function with which Celery runs the task. Celery sets it in each worker process."""
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
        *more: Any,
        **options: Any,
    ) -> Any:
        """Send the task as ``celery.Task.apply_async`` does, and let SQS delay it if SQS can.

        With ``countdown`` (seconds) or ``eta`` the message gets SQS's ``DelaySeconds``, at most
        900, except on FIFO queues, which have no delay per message. The ETA also stays on the
        message, and the worker does not run the task before the ETA.
        """
        if delay := self._delay_seconds(producer, args, kwargs, options):
            options["DelaySeconds"] = delay
        return super().apply_async(args, kwargs, task_id, producer, *more, **options)

    retry = retry_task

    @property
    def lease_lost(self) -> bool:
        """Whether another worker may already be running this message.

        Check this in a long task before a side effect that must not happen twice. It becomes true
        when SQS refuses to renew the message's visibility timeout. It also becomes true when that
        timeout runs out because the worker cannot reach SQS. Once true, it stays true for the rest
        of the run. It is always false on other brokers. SQS does not always report the loss: a
        standard queue accepts renewals of an expired receipt handle.
        """
        run = run_of(self.request)
        delivery = None if run is None else run.delivery
        return delivery is not None and exists(delivery.lost_flag or "")

    @classmethod
    def _resolve_options(cls, app: Any) -> Options:
        if vars(cls).get("_decorated"):
            Options.refuse_misspelt(vars(cls).keys() - {*dir(cls.__bases__[0]), *AUTORETRY_OPTIONS})
        own = {name: getattr(cls, name) for name in Options.names() if _is_set_by_user(cls, name)}
        return Options.resolve(
            app_wide=app.conf.get("sqs_backoff") or {},
            own={**options_from_autoretry(cls), **own},
            setting=_setting_name(app),
        )

    #: Returns the verdict on a failure of this run.
    _judge = judge_failure

    def _delay_seconds(self, producer: Any, args: Any, kwargs: Any, options: Any) -> int:
        """Return the seconds for which SQS should delay a message, or 0 if SQS cannot delay it."""
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
        seconds: float = seconds_until(eta, self, time.time()) if countdown is None else countdown
        return max(0, min(MAX_DELAY_SECONDS, math.floor(seconds)))


def _is_set_by_user(cls: type[BackoffTask], name: str) -> bool:
    """Return whether the task sets the option by its decorator, or by a class of the user."""
    setter = next(c for c in cls.__mro__ if name in vars(c))
    module = setter.__module__ or ""  # code of exec() has no module
    return "_decorated" in vars(setter) or not module.startswith(_OURS)


def _name_of(cls: Any) -> str:
    """Return the task's name or, as in Celery, the class's name while the task has no name."""
    return str(cls.name or cls.__qualname__)


def _keep_celerys_behaviour(cls: Any, app: Any) -> None:
    """Restore the attributes of ``celery.Task`` on one of Celery's own tasks.

    If the app's ``task_cls`` is our base class, Celery's own tasks inherit from it, too. They rely
    on Celery's behaviour. For example, ``chord_unlock`` polls by retrying itself. If each retry
    kept the message, the polls would soon use up the receives that the queue allows.
    """
    cls.Request, cls.Strategy = Task.Request, Task.Strategy
    cls.acks_late = app.conf.task_acks_late
    if "max_retries" not in vars(cls):
        cls.max_retries = Task.max_retries


def _check_request_class(cls: Any, app: Any) -> None:
    """Refuse a user's ``Request`` class that would delete the messages of failed tasks.

    Raises:
        ImproperlyConfigured: the class is not a subclass of ``BackoffRequest``.
        ImportError, AttributeError: the class cannot be imported.
    """
    given = cls.Request
    if given == _REQUEST or not _may_be_sqs(app):
        return
    classes = symbol_by_name(given).__mro__
    if _REQUEST not in [f"{c.__module__}:{c.__qualname__}" for c in classes]:
        raise ImproperlyConfigured(
            f"invalid Request {given!r}: expected a subclass of {_REQUEST.replace(':', '.')}; any"
            " other class would delete the messages of failed tasks"
        )


def _check_provider_key(cls: Any) -> None:
    """Refuse a provider with a ``key`` that names no argument of the task.

    With such a key, an outage for one tenant would pause the calls for all tenants. The function
    does not check the provider in the app-wide options, which may be meant for other tasks.
    """
    key = getattr(cls.provider, "key", None)
    if key is None:
        return
    run = inspect.getattr_static(cls, "run")
    is_bound = isinstance(run, staticmethod | classmethod)
    function = cls.run if is_bound else MethodType(run, cls)
    try:
        check_key(key, function)
    except ValueError as exc:
        raise InvalidOption(f"invalid provider: {exc}", "provider") from exc


def _setting_name(app: Any) -> str:
    """Return the name of the setting with our app-wide options, such as ``CELERY_SQS_BACKOFF``."""
    namespace = getattr(app, "namespace", None) or getattr(app, "_config_namespace", None)
    return f"{namespace}_SQS_BACKOFF" if namespace else "sqs_backoff"


def _may_be_sqs(app: Any) -> bool:
    """Return whether the broker is SQS or is not configured yet."""
    url = app.conf.broker_read_url or app.conf.broker_url or ""
    first = url[0] if isinstance(url, list | tuple) and url else url
    return not first or str(first).startswith("sqs")
