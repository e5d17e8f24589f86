"""SQS as the engine: StartMessageMoveTask moves a dead-letter queue without us in between.

https://docs.aws.amazon.com/AWSSimpleQueueService/latest/APIReference/API_StartMessageMoveTask.html
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

from ..sqs.errors import Failure, Kind, Operation, failure_of
from .audit import audited
from .errors import RedriveError, RedriveRefused, RedriveUnreachable, unreachable
from .events import Event, Finished, Progress, Started
from .queues import Endpoint, retried
from .report import Ended, RedriveReport
from .settings import Settings

__all__ = ["MAX_PER_SECOND", "move", "why_not"]

#: ``MaxNumberOfMessagesPerSecond``. Same page.
MAX_PER_SECOND = 500

_POLL_SECONDS = 1.0

#: A move takes up to 36 h, and SQS does not need us for it: so long without an answer is endured.
_UNANSWERED_SECONDS = 60.0

#: Tasks that SQS lists at most. Same reference, ListMessageMoveTasks.
_MOST_LISTED = 10

_GOES_ON = "The move goes on in SQS, without us; the console or CancelMessageMoveTask ends it."
_IN_DOUBT = "It is not known whether the move has begun (see ListMessageMoveTasks)."
_OVER = {"COMPLETED", "CANCELLED", "FAILED"}


_USUAL = Settings()


def why_not(settings: Settings, *, is_fifo: bool) -> str | None:
    """Why SQS's own move cannot do what is asked; ``None`` if it can."""
    if not settings.selection.is_everything or settings.limit is not None:
        return "it moves all messages: it has no selection and no limit"
    wanted = {
        "ramp": settings.ramp,
        "spread": settings.spread,
        "canary": settings.canary,
        "probe": settings.probe,
        "delete": settings.delete,
        "dump": settings.dump,
        "journal": settings.journal,
        "expired": settings.expired != "leave",
        "max_replays": settings.max_replays != _USUAL.max_replays,
        "in_doubt": settings.in_doubt != _USUAL.in_doubt,
        "threads": settings.threads,
    }
    if asked := [name for name, value in wanted.items() if value]:
        return f"it has no {', '.join(asked)}"
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
    source: Endpoint,
    to: Endpoint | None,
    settings: Settings,
    *,
    on_event: Callable[[Event], None] | None,
    stop: threading.Event | None,
    clock: Callable[[], float] = time.monotonic,
) -> RedriveReport:
    """Move all messages of a dead-letter queue, and wait until it is done.

    Poison, expired tasks and replay counts are not looked at. ``stop`` cancels the move.

    Arguments:
        source: the dead-letter queue.
        to: where all go; ``None``: SQS decides, by where it has moved each from.
        settings: of which :func:`why_not` has nothing to say.

    Raises:
        RedriveRefused: SQS refuses it.
        RedriveUnreachable: SQS does not answer.
    """
    stop = stop or threading.Event()
    tell = on_event or (lambda event: None)
    started_at, messages = clock(), source.depth().total
    request: dict[str, Any] = {"SourceArn": str(source.arn)}
    if to is not None:
        # SQS itself only knows where a message came from if it has moved the message here; those
        # that our worker has dead-lettered were sent, and the move would fail at the first.
        request["DestinationArn"] = str(to.arn)
    if settings.rate is not None:
        request["MaxNumberOfMessagesPerSecond"] = int(settings.rate)
    task = _Task(source)
    destinations = [str(request.get("DestinationArn", "each message's own queue"))]
    try:
        task.start(request)
        tell(Started(uuid4().hex[:12], source.name, messages, threads=0))
        state = _followed(task, messages, started_at, tell, stop, clock)
        report = _report(source, state, task.moved, messages)
    except RedriveRefused:  # there is no move
        raise
    except BaseException as exc:  # SQS may have moved some, whatever ends our looking
        is_ours = isinstance(exc, RedriveError)
        report = RedriveReport(
            sent=task.moved,
            deleted=task.moved,
            remaining=max(0, messages - task.moved),
            ended=Ended.UNREACHABLE if is_ours else Ended.INTERRUPTED,
            detail=str(exc) if is_ours else f"{type(exc).__name__}. {task.what_now}",
        )
        _tell_end(tell, settings, report, source, destinations)
        raise
    _tell_end(tell, settings, report, source, destinations)
    return report


def _followed(
    task: _Task,
    messages: int,
    started_at: float,
    tell: Callable[[Event], None],
    stop: threading.Event,
    clock: Callable[[], float],
) -> dict[str, Any]:
    """Wait until the move is over; return what SQS lists of it then."""
    answered_at, cancelled = clock(), False
    while True:
        stop.wait(_POLL_SECONDS)
        if stop.is_set():
            if cancelled:
                time.sleep(_POLL_SECONDS)
            task.cancel()  # each time: the last one may not have been heard
            cancelled = True
        state = task.state()
        if isinstance(state, Failure):
            if clock() - answered_at > _UNANSWERED_SECONDS:
                error = unreachable("ListMessageMoveTasks", state)
                raise RedriveUnreachable(f"{error} {_GOES_ON}", error.code)
            continue
        answered_at = clock()
        rate = task.moved / max(0.1, clock() - started_at)
        left = max(0, messages - task.moved)
        eta = left / rate if rate else None
        tell(Progress(task.moved, messages, task.moved, 0, 0, 0, 0, messages, rate, eta))
        if state.get("Status") in _OVER:
            return state


def _tell_end(
    tell: Callable[[Event], None],
    settings: Settings,
    report: RedriveReport,
    source: Endpoint,
    destinations: Sequence[str],
) -> None:
    by_task = {"(all: moved by SQS)": report.sent}
    arn = str(source.arn)
    tell(audited(settings, report, source=arn, destinations=destinations, by_task=by_task))
    tell(Finished(report, report.ended.value, report.detail))


def _report(source: Endpoint, state: dict[str, Any], moved: int, messages: int) -> RedriveReport:
    ended, detail = Ended.DONE, ""
    if state["Status"] == "FAILED":
        ended, detail = Ended.UNREACHABLE, f"SQS: {state.get('FailureReason', 'no reason given')}"
    elif state["Status"] == "CANCELLED":  # by us, or by somebody else
        ended, detail = Ended.INTERRUPTED, "the move was cancelled; what was moved stays moved"
    try:
        remaining = source.depth().total
    except RedriveError:  # the report of what was done is worth more than this one number
        remaining = max(0, messages - moved)
    return RedriveReport(sent=moved, deleted=moved, remaining=remaining, ended=ended, detail=detail)


class _Task:
    """A move of this queue, told apart from those before it."""

    def __init__(self, source: Endpoint) -> None:
        self._source = source
        self._handle: str | None = None
        self._before: set[object] = set()
        self.moved = 0

    def start(self, request: dict[str, Any]) -> None:
        """Start it.

        Raises:
            RedriveRefused: SQS does not do it, and why.
            RedriveUnreachable: SQS does not answer.
        """
        listed = retried(self._listed)
        if isinstance(listed, Failure):
            raise self._error("ListMessageMoveTasks", listed)
        self._before = {task.get("StartedTimestamp") for task in listed}
        try:
            self._handle = str(self._source.client.start_message_move_task(**request)["TaskHandle"])
        except Exception as exc:  # any exception is a result
            failure = failure_of(exc, Operation.RECEIVE)
            if not failure.may_have_been_done or not self._found(retried(self._listed)):
                raise self._error("StartMessageMoveTask", failure, exc) from exc

    @property
    def what_now(self) -> str:
        """For a person, whom we leave alone with it."""
        return _IN_DOUBT if self._handle is None else _GOES_ON

    def state(self) -> dict[str, Any] | Failure:
        """What SQS lists of it; as running if it is not listed yet."""
        listed = self._listed()
        if isinstance(listed, Failure):
            return listed
        found = self._found(listed) or {"Status": "RUNNING"}
        self.moved = int(found.get("ApproximateNumberOfMessagesMoved") or 0)
        return found

    def cancel(self) -> None:
        """Ask SQS to end it. Raises RedriveUnreachable if that is not allowed."""
        handle = self._handle
        try:
            if handle is not None:
                self._source.client.cancel_message_move_task(TaskHandle=handle)
        except Exception as exc:  # any exception is a result
            failure = failure_of(exc, Operation.RECEIVE)
            if failure.kind is Kind.DENIED:
                raise unreachable(f"{_GOES_ON} CancelMessageMoveTask", failure) from exc
            # It has just ended, or SQS did not answer: the state will show.

    def _listed(self) -> list[dict[str, Any]] | Failure:
        try:
            answer: Any = self._source.client.list_message_move_tasks(
                SourceArn=str(self._source.arn), MaxResults=_MOST_LISTED
            )
            return list(answer.get("Results") or ())
        except Exception as exc:  # noqa: BLE001  # any exception is a result
            return failure_of(exc, Operation.RECEIVE)

    def _found(self, listed: list[dict[str, Any]] | Failure) -> dict[str, Any] | None:
        """By its handle while it runs; afterwards as the one that was not there before."""
        for task in [] if isinstance(listed, Failure) else listed:
            is_new = task.get("StartedTimestamp") not in self._before
            if is_new or (self._handle is not None and task.get("TaskHandle") == self._handle):
                self._handle = task.get("TaskHandle") or self._handle
                return task
        return None

    @staticmethod
    def _error(what: str, failure: Failure, exc: Exception | None = None) -> Exception:
        if failure.kind is Kind.UNSUPPORTED:
            return RedriveRefused(f"This SQS does not have {what}. Use the client engine.")
        if failure.kind is Kind.LOCAL:
            response = getattr(exc, "response", None) or {}
            text = response.get("Error", {}).get("Message", failure.code)
            return RedriveRefused(f"SQS refuses the move: {text}")
        if failure.may_have_been_done and exc is not None:
            what = f"{_IN_DOUBT} {what}"
        return unreachable(what, failure)
