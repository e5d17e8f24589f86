"""SQS as the engine: StartMessageMoveTask moves a dead-letter queue without us in between.

https://docs.aws.amazon.com/AWSSimpleQueueService/latest/APIReference/API_StartMessageMoveTask.html
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from botocore.exceptions import BotoCoreError, ClientError

from ..queues import error_code
from .broker import Broker, Endpoint
from .errors import RedriveRefused, RedriveUnreachable, unreachable
from .events import Event, Finished, Progress, Started
from .report import Ended, RedriveReport
from .route import find_route
from .send import is_denied
from .settings import Settings

__all__ = ["MAX_PER_SECOND", "move", "why_not"]

#: ``MaxNumberOfMessagesPerSecond``. Same page.
MAX_PER_SECOND = 500

_POLL_SECONDS = 1.0

#: A move takes up to 36 h, and SQS does not need us for it: so long without an answer is endured.
_UNANSWERED_SECONDS = 60.0

_GOES_ON = "The move goes on in SQS, without us; the console or CancelMessageMoveTask ends it."
_OVER = {"COMPLETED", "CANCELLED", "FAILED"}

_UNSUPPORTED = {"InvalidAction", "UnsupportedOperation", "UnknownOperation", "NotImplemented"}


def why_not(settings: Settings, *, is_fifo: bool) -> str | None:
    """Why SQS's own move cannot do what is asked; ``None`` if it can."""
    if not settings.selection.is_everything or settings.limit is not None:
        return "it moves all messages: it knows no selection and no limit"
    wanted = {
        "ramp": settings.ramp,
        "spread": settings.spread,
        "canary": settings.canary,
        "probe": settings.probe,
        "delete": settings.delete,
        "dump": settings.dump,
        "journal": settings.journal,
        "expired": settings.expired != "leave",
    }
    if asked := [name for name, value in wanted.items() if value]:
        return f"it knows nothing of {', '.join(asked)}"
    if is_fifo:
        return (
            "it sends FIFO messages with the deduplication id they have, so those first sent less"
            " than five minutes ago may be taken for duplicates and be lost"
        )
    rate = settings.rate
    if rate is not None and not (1 <= rate <= MAX_PER_SECOND and rate == int(rate)):
        return f"its rate is a whole number from 1 to {MAX_PER_SECOND} messages per second"
    return None


def move(
    broker: Broker,
    source: str,
    *,
    to: str | None,
    settings: Settings,
    on_event: Callable[[Event], None] | None,
    stop: threading.Event | None,
    clock: Callable[[], float] = time.monotonic,
) -> RedriveReport:
    """Move all messages of a dead-letter queue, and wait until it is done.

    Poison, expired tasks and replay counts are not looked at. ``stop`` cancels the move.

    Raises:
        RedriveRefused: the native engine cannot serve, and why.
        RedriveUnreachable: SQS does not answer.
    """
    route = find_route(broker, source, to=to, force=settings.force)
    if why := why_not(settings, is_fifo=route.source.is_fifo):
        raise RedriveRefused(f"The native engine cannot do this: {why}. Use the client engine.")
    stop = stop or threading.Event()
    tell = on_event or (lambda event: None)
    started_at, messages = clock(), route.source.depth().total
    request: dict[str, Any] = {"SourceArn": route.queue.arn}
    if route.default is not None:
        # SQS itself only knows where a message came from if it has moved the message here; those
        # that our worker has dead-lettered were sent, and the move would fail at the first.
        request["DestinationArn"] = route.default.read().arn
    if settings.rate is not None:
        request["MaxNumberOfMessagesPerSecond"] = int(settings.rate)
    handle = _start(route.source, request)
    tell(Started(uuid4().hex[:12], route.source.name, messages, threads=0))
    answered_at, cancelled = clock(), False
    while True:
        stop.wait(_POLL_SECONDS)
        if stop.is_set():
            if cancelled:
                time.sleep(_POLL_SECONDS)
            _cancel(route.source, handle)  # each time: the last one may not have been heard
            cancelled = True
        try:
            state = _state(route.source, str(route.queue.arn))
        except RedriveUnreachable as exc:
            if clock() - answered_at > _UNANSWERED_SECONDS:
                raise RedriveUnreachable(f"{exc}. {_GOES_ON}", exc.code) from exc
            continue
        answered_at = clock()
        moved = int(state.get("ApproximateNumberOfMessagesMoved") or 0)
        rate = moved / max(0.1, clock() - started_at)
        left = max(0, messages - moved)
        tell(Progress(moved, messages, moved, 0, 0, 0, 0, rate, left / rate if rate else None))
        if state["Status"] in _OVER:
            break
    report = _report(route.source, state, moved)
    tell(Finished(report))
    return report


def _report(source: Endpoint, state: dict[str, Any], moved: int) -> RedriveReport:
    ended, detail = Ended.DONE, ""
    if state["Status"] == "FAILED":
        ended, detail = Ended.UNREACHABLE, f"SQS: {state.get('FailureReason', 'no reason given')}"
    elif state["Status"] == "CANCELLED":  # by us, or by somebody else
        ended, detail = Ended.INTERRUPTED, "the move was cancelled; what was moved stays moved"
    return RedriveReport(
        sent=moved, deleted=moved, remaining=source.depth().total, ended=ended, detail=detail
    )


def _start(source: Endpoint, request: dict[str, Any]) -> str:
    try:
        return str(source.client.start_message_move_task(**request)["TaskHandle"])
    except ClientError as exc:
        status = exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if error_code(exc) in _UNSUPPORTED or status in (404, 500, 501):
            raise RedriveRefused(
                "This SQS does not know StartMessageMoveTask. Use the client engine."
            ) from exc
        if status == 400:
            text = exc.response.get("Error", {}).get("Message", error_code(exc))
            raise RedriveRefused(f"SQS refuses the move: {text}") from exc
        raise unreachable("StartMessageMoveTask", exc) from exc
    except BotoCoreError as exc:
        raise unreachable("StartMessageMoveTask", exc) from exc


def _state(source: Endpoint, arn: str) -> dict[str, Any]:
    try:
        answer = source.client.list_message_move_tasks(SourceArn=arn, MaxResults=1)
    except (ClientError, BotoCoreError) as exc:
        raise unreachable("ListMessageMoveTasks", exc) from exc
    if not answer.get("Results"):
        raise RedriveUnreachable("ListMessageMoveTasks does not list the move")
    return dict(answer["Results"][0])


def _cancel(source: Endpoint, handle: str) -> None:
    try:
        source.client.cancel_message_move_task(TaskHandle=handle)
    except (ClientError, BotoCoreError) as exc:
        if is_denied(error_code(exc)):
            raise unreachable(f"{_GOES_ON} CancelMessageMoveTask", exc) from exc
        # It has just ended, or SQS was not in the mood: the state will tell.
