"""Why did a message run again that a run had already settled? Pure: times and facts in, a word out.

All times are seconds of one monotonic clock, which Linux gives to all processes of a machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

__all__ = ["Call", "History", "Kill", "Run", "explain", "extra_runs"]

#: The run has decided what becomes of its message: there should be no other after it.
SETTLING = {"success", "fail"}

_DELETE = "DeleteMessageBatch"
_HIDE = "ChangeMessageVisibilityBatch"
_DEAD_LETTER = "SendMessageBatch"

#: A worker that nothing keeps from it deletes a message that is done within this time.
_PROMPT_SECONDS = 3.0

#: A request may be on its way for so long between a clock reading here and one there.
_SLACK_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of a message, as its task has noted it. ``outcome``: ``None`` if it was cut short."""

    message_id: str
    worker: int  # pid of the main process
    pid: int
    received_at: float
    started_at: float
    ended_at: float | None = None
    outcome: str | None = None


@dataclass(frozen=True, kw_only=True)
class Call:
    """What became of one message in one call to SQS. ``fault``: what was injected."""

    action: str
    worker: int
    at: float
    answered_at: float
    reached: bool = True  # SQS has acted on it
    fault: str | None = None
    seconds: int | None = None  # of a ChangeMessageVisibility


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A signal that was sent to a process: a worker's main one with all of its children, or one."""

    at: float
    signal: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class History:
    """What happened to one message, and around it."""

    visibility_timeout_seconds: float
    #: Answers of ReceiveMessage that had the message.
    received_at: Sequence[float] = ()
    #: Calls about the message.
    calls: Sequence[Call] = ()
    #: Calls whose answers were held back, of any worker, about any messages.
    slow_calls: Sequence[Call] = ()
    kills: Sequence[Kill] = ()
    #: When SQS could not be reached: from, to.
    outages: Sequence[tuple[float, float]] = field(default=())


def extra_runs(runs: Iterable[Run]) -> tuple[Run | None, list[Run]]:
    """Find the run of one message that settled it first, and those that began after that one."""
    ordered = sorted(runs, key=lambda run: run.started_at)
    settled = [run for run in ordered if run.outcome in SETTLING]
    if not settled:
        return None, []
    first = min(settled, key=lambda run: run.ended_at or 0.0)
    return first, [run for run in ordered if run.started_at > first.started_at]


def explain(extra: Run, settled: Run, history: History) -> str | None:
    """Name the injected fault that made ``extra`` of a message that ``settled`` had done with.

    ``None``: there is none, so it is a bug.
    """
    until = max(extra.received_at, settled.received_at)  # from then on there were two holders
    deleted = [c.at for c in history.calls if c.action == _DELETE and c.reached and c.at < until]
    if deleted:
        return None  # SQS had deleted it: it can only be another message
    ended_at = settled.ended_at or settled.started_at
    same_receive = extra.received_at == settled.received_at
    for kill in history.kills:
        if (
            kill.pid in (settled.worker, settled.pid)
            and settled.started_at <= kill.at <= ended_at + _PROMPT_SECONDS
            and kill.at <= (extra.started_at if same_receive else until)
        ):
            # With one receive: the pool has begun the job again, not knowing that it was begun.
            return f"{kill.signal} before the {'pool knew' if same_receive else 'delete'}"
    if extra.received_at < settled.received_at:
        return _lapsed(extra, until, history)
    removals = [c for c in history.calls if c.action in (_DELETE, _DEAD_LETTER)]
    if any(c.fault and ended_at <= c.at <= until for c in removals):
        return "delete or dead letter spoiled"
    if any(
        c.worker == settled.worker
        and c.action in (_DELETE, _DEAD_LETTER)
        # begun before and not answered until now, or begun meanwhile
        and c.at <= until
        and c.answered_at >= ended_at
        for c in history.slow_calls
    ):
        return "delete held up by a slow answer"
    if _overlaps(history.outages, ended_at, until):
        return "SQS was unreachable at the delete"
    return _lapsed(settled, until, history)


def _lapsed(holder: Run, until: float, history: History) -> str | None:
    """The lease ran out because its renewals did not come through."""
    holds = [(at, history.visibility_timeout_seconds) for at in history.received_at]
    holds += [
        (c.at, c.seconds) for c in history.calls if c.action == _HIDE and c.reached and c.seconds
    ]
    before = [(at, seconds) for at, seconds in holds if at < until - _SLACK_SECONDS]
    if not before:
        return None
    held_at = max(at for at, _ in before)
    if until < max(at + seconds for at, seconds in before) - 1:
        return None  # it was hidden, and came all the same
    spoiled = [c for c in history.calls if c.action == _HIDE and c.fault]
    slow = [c for c in history.slow_calls if c.worker == holder.worker and c.action == _HIDE]
    if any(held_at <= c.answered_at and c.at <= until for c in [*spoiled, *slow]) or _overlaps(
        history.outages, held_at, until
    ):
        return "renewal spoiled for longer than the visibility timeout"
    return None


def _overlaps(intervals: Iterable[tuple[float, float]], start: float, end: float) -> bool:
    return any(begin <= end and finish >= start for begin, finish in intervals)
