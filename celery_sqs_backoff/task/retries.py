"""The retry that a task asks for by ``self.retry()``."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from typing import Any

from celery import Task
from celery.exceptions import Reject, Retry, TaskPredicate
from celery.utils.serialization import raise_with_context
from celery.utils.time import maybe_make_aware

from ..retry.budget import GiveUpReason, draw_delay, find_reason
from ..sqs.delivery import Delivery
from .handover import Asked, BackoffRetry, run_of

#: Arguments of a task that cannot be changed in place.
_UNCHANGEABLE = (str, bytes, int, float, type(None))


def retry(
    task: Any,
    args: Any = None,
    kwargs: Any = None,
    exc: Any = None,
    throw: bool = True,
    eta: datetime | None = None,
    countdown: float | None = None,
    max_retries: int | None = None,
    **options: Any,
) -> Any:
    """Retry as ``celery.Task.retry`` does, but keep the message if it need not change.

    The arguments are Celery's. Without ``countdown`` (seconds) and ``eta`` the delay is drawn from
    ``backoff`` instead of being ``default_retry_delay``. The message is kept and hidden if
    arguments and route have not changed, ``throw`` is true, and the delay ends within the 12 hours
    since the receive that SQS allows. Otherwise a copy is published immediately, as Celery does.
    ``max_retries=0`` means "fail now": the task's rules do not retry that failure.

    Raises:
        celery.exceptions.Retry: always, unless ``throw`` is false.
        exc, or MaxRetriesExceededError: no retry is left.
    """
    if not task.is_covered or task.request.called_directly:
        return Task.retry(task, args, kwargs, exc, throw, eta, countdown, max_retries, **options)
    request, now = task.request, time.time()
    run: Any = run_of(request)
    delivery: Any = None if run is None else run.delivery
    if isinstance(exc, type):
        exc = _make(exc)
    cause = exc if isinstance(exc, BaseException) else sys.exc_info()[1]
    retries = int(request.retries)
    limit = task.max_retries if max_retries is None else max_retries
    is_named = countdown is not None or eta is not None
    if not is_named:
        countdown = draw_retry_delay(task, delivery)
    delay = seconds_until(eta, task, now) if countdown is None else countdown

    can_hide = throw and delivery is not None and not _is_changed(request, args, kwargs, options)
    seconds = delivery.visibility_delay(delay, now=now) if can_hide else 0
    is_hidden = can_hide and delay <= seconds
    reason = GiveUpReason.MAX_RETRIES if limit is not None and retries >= limit else None
    if reason is None and is_hidden:
        reason = find_reason(
            delivery.standing(retries=retries, now=now),
            max_retries=limit,
            retry_for=task.backoff_options.retry_for,
            delay=delay,
        )
    if reason is not None:
        failure = exc
        if failure is None:
            failure = task.MaxRetriesExceededError(
                f"Can't retry {task.name}[{request.id}]: {reason.value}",
                task_args=request.args,
                task_kwargs=request.kwargs,
            )
        if run is not None:
            run.asked = Asked(failure, cause, reason)
        raise_with_context(failure)
    if is_hidden:
        raised = BackoffRetry(exc=exc, when=seconds)
        run.asked = Asked(raised, cause, is_named=is_named)
        raise raised
    try:
        given = (task, args, kwargs, exc, False, eta, countdown)
        copy = publish(task, retries + 1, partial(Task.retry, *given, **options))
    except Reject as refused:  # the broker does not take it
        if run is not None:
            run.asked = Asked(refused, cause)
        raise
    if run is not None:
        run.copy, run.asked = copy, Asked(copy, cause)
    if throw:
        raise copy
    return copy


def publish(task: Any, retries: int, celerys_retry: Callable[..., Retry]) -> Retry:
    """Publish a copy of the message as retry number ``retries``."""
    request = task.request
    before, request.retries = request.retries, retries - 1  # Celery adds one
    try:
        return celerys_retry(max_retries=retries)
    finally:
        request.retries = before


def draw_retry_delay(task: Any, delivery: Delivery | None) -> float:
    """Draw seconds from the task's policy, for the failure of this run."""
    request = task.request
    return draw_delay(
        task.backoff_options,
        message_id=request.id if delivery is None else delivery.message_id,
        attempt=int(request.retries) + 1,
        is_fifo=delivery is not None and delivery.is_fifo,
        rng=random,
    )


def seconds_until(eta: datetime | None, task: Any, now: float) -> float:
    """Return the seconds until an ETA, or 0 without an ETA."""
    return 0.0 if eta is None else maybe_make_aware(eta, task.app.timezone).timestamp() - now


def retry_in_place_of(task: Any, raised: Retry) -> Exception:
    """Return the answer of the task's ``retry()`` for a ``Retry`` without a message.

    A task that is called as a function raises one, because its ``retry()`` has no message to
    publish. The task's code may also raise one by hand. Celery takes it for a published copy and
    acknowledges the message. A task that overrides ``retry()`` may have published its own copy, so
    its ``Retry`` is returned unchanged.
    """
    has_message = raised.sig is not None or isinstance(raised, BackoffRetry)
    if has_message or type(task).retry is not retry:
        return raised  # type: ignore[no-any-return]
    cause = raised.exc or raised.__cause__ or raised.__context__
    if not isinstance(cause, Exception) or isinstance(cause, TaskPredicate):
        cause = None
    when = {"eta" if isinstance(raised.when, datetime) else "countdown": raised.when}
    try:
        task.retry(exc=cause, **when)
    except Exception as asked:  # noqa: BLE001  # Retry, Reject, or the failure itself
        return asked.with_traceback(None)
    return raised  # type: ignore[no-any-return]


def _make(error: type[BaseException]) -> BaseException:
    """Make an error of the given class, or return the error that its constructor raises."""
    try:
        return error()
    except Exception as failure:  # noqa: BLE001  # such as a TypeError: it needs arguments
        return failure


def _is_changed(request: Any, args: Any, kwargs: Any, options: Mapping[str, Any]) -> bool:
    """Return whether the arguments of ``retry()`` may differ from the message's.

    The task may have changed a list or dict in place, which changes the request's, too.
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
