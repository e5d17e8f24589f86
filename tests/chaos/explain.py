"""Why did a message run again that a run had already settled? Pure: times and facts in, a word out.

All times are seconds of one monotonic clock, which Linux gives to all processes of a machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

#: The run has decided what becomes of its message: there should be no other after it.
SETTLING = {"success", "fail"}

_DELETE = "DeleteMessageBatch"
_HIDE = "ChangeMessageVisibilityBatch"
_DEAD_LETTER = "SendMessageBatch"

#: A worker that nothing keeps from it deletes a message that is done within this time.
_PROMPT_SECONDS = 2.0

#: A request may be on its way for so long between a clock reading here and one there.
_SLACK_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of a message, as its task has noted it. ``outcome``: ``None`` if it was cut short."""

    message_id: str
    worker: int  # pid of the main process
    pid: int
    received_at: float
    #: When the worker had the answer to its receive; ``None``: at once.
    arrived_at: float | None = None
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
    first, second = sorted((settled, extra), key=lambda run: run.received_at)
    until = second.received_at  # from then on there were two holders
    if any(c.action == _DELETE and c.reached and c.at < until for c in history.calls):
        return None  # SQS had deleted it: it can only be another message
    if first is settled and (found := _not_removed(extra, settled, until, history)):
        return found
    return _lapsed(first, until, history)


def explains_copies(history: History) -> bool:
    """Whether something injected made a message a dead letter twice.

    It is sent first and deleted then, so that it is not lost in between: a lost answer to either
    call, or the worker's end, makes a copy.
    """
    removals = [c for c in history.calls if c.action in (_DELETE, _DEAD_LETTER)]
    return any(
        c.fault
        or _covered(history.outages, c.at - 1, c.answered_at + 1)
        or any(k.pid == c.worker and 0 <= k.at - c.at <= _PROMPT_SECONDS for k in history.kills)
        for c in removals
    )


def _not_removed(extra: Run, settled: Run, until: float, history: History) -> str | None:
    """The worker has died, or could not reach SQS, before the message was deleted."""
    ended_at = settled.ended_at or settled.started_at
    deadline = ended_at + _PROMPT_SECONDS
    is_same_receive = extra.received_at == settled.received_at
    for kill in history.kills:
        if (
            kill.pid in (settled.worker, settled.pid)
            and settled.started_at <= kill.at <= deadline
            and kill.at <= (extra.started_at if is_same_receive else until)
        ):
            # With one receive: the pool has begun the job again, not knowing that it was begun.
            return f"{kill.signal} before the {'pool knew' if is_same_receive else 'delete'}"
    if until < ended_at:
        return None
    removals = (_DELETE, _DEAD_LETTER)
    if settled.outcome == "fail" and _postponed(settled, ended_at, until, history):
        return "given up before the queue could be read"
    if any(c.action in removals and c.fault and ended_at <= c.at <= until for c in history.calls):
        return "delete or dead letter spoiled"
    held_up = [
        (c.at, c.answered_at)
        for c in history.slow_calls
        if c.worker == settled.worker and c.action in removals
    ]
    if _covered(held_up, ended_at, deadline):
        return "delete held up by a slow answer"
    if _covered(history.outages, ended_at, deadline):
        return "SQS was unreachable at the delete"
    return None


def _postponed(settled: Run, ended_at: float, until: float, history: History) -> bool:
    """Its worker began while SQS was away, so that it did not know where dead letters go.

    It has hidden the message, and would not run it again; but another worker has received it.
    """
    return any(began < ended_at for began, _ in history.outages) and any(
        c.action == _HIDE and c.worker == settled.worker and ended_at <= c.at <= until
        for c in history.calls
    )


def _lapsed(holder: Run, until: float, history: History) -> str | None:
    """The hold ran out: for most of the time in which it should have been renewed, it could not."""
    holds = [(at, history.visibility_timeout_seconds) for at in history.received_at]
    holds += [
        (c.at, c.seconds) for c in history.calls if c.action == _HIDE and c.reached and c.seconds
    ]
    before = [(at, seconds) for at, seconds in holds if at < until - _SLACK_SECONDS]
    if not before:
        return None
    held_at, seconds = max(before, key=sum)
    if until < held_at + seconds - 1:
        return None  # it was hidden, and came all the same
    blocked = [
        (holder.received_at, holder.arrived_at or holder.received_at),
        *history.outages,
        *((c.at, c.at + 1) for c in history.calls if c.action == _HIDE and c.fault),
        *(
            (c.at, c.answered_at)
            for c in history.slow_calls
            if c.worker == holder.worker and c.action == _HIDE
        ),
    ]
    due_at = held_at + seconds / 3
    if _covered(blocked, due_at, held_at + seconds) >= seconds / 3:
        return "renewal spoiled for longer than the visibility timeout"
    return None


def _covered(intervals: Iterable[tuple[float, float]], start: float, end: float) -> float:
    """Return how much of the time from start to end lies in one of the intervals."""
    covered, reached = 0.0, start
    for begin, finish in sorted(intervals):
        begin, finish = max(begin, reached), min(finish, end)
        if finish > begin:
            covered += finish - begin
            reached = finish
    return covered
