"""The retry that a run asks for: how many there were, how many may be, when, and what for."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from celery.exceptions import Reject, Retry, TaskPredicate

from ..retry.budget import draw_delay
from .handover import delivery_of


def drawn_delay(task: Any, request: Any) -> float:
    """Draw seconds from the task's policy, for the failure of this run."""
    delivery, options = delivery_of(request), task.backoff_options
    return draw_delay(
        options.backoff,
        message_id=request.id if delivery is None else delivery.message_id,
        attempt=int(request.retries) + 1,
        cap=options.fifo_cap if delivery is not None and delivery.is_fifo else None,
        rng=random,
    )


def made(error: type[BaseException]) -> BaseException:
    """Make the error of the class that ``retry()`` was given; or return what its code raises."""
    try:
        return error()
    except Exception as failure:  # noqa: BLE001  # such as a TypeError: it needs arguments
        return failure


def note_cause(retry: TaskPredicate, exc: BaseException | None) -> TaskPredicate:
    """Note what a retry, or the ``Reject`` of its copy, is for.

    Of an error that pickle cannot restore, Celery notes a parent.
    """
    retry.sqs_cause = exc
    return retry


def cause_of(retry: Retry) -> BaseException | None:
    """Return what a retry is for: the error given or, in an ``except`` block, the one caught.

    ``None``: the task has asked for it without one.
    """
    cause: BaseException | None = getattr(retry, "sqs_cause", None) or retry.exc
    return cause or retry.__context__


def rejected_for(reject: Reject) -> BaseException | None:
    """Return what a message is rejected for: the error given or caught.

    Of a copy that the broker has refused: what its retry was for.
    """
    caught = reject.reason if isinstance(reject.reason, Exception) else reject.__context__
    cause: BaseException | None = getattr(reject, "sqs_cause", caught)
    return cause


def publish_as(retries: int, request: Any, publish: Callable[..., Retry]) -> Retry:
    """Publish the message as the retry of that number, which we have allowed."""
    before, request.retries = request.retries, retries - 1  # Celery adds one
    try:
        return publish(max_retries=retries)
    finally:
        request.retries = before
