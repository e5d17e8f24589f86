"""Find the injected fault that made a message run again after an earlier run had settled it.

A run settles its message when it succeeds or fails for good. The functions are pure. All times are
seconds of one monotonic clock, which Linux gives to all processes of a machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

#: A run with one of these outcomes settles its message, so no other run should come after it.
SETTLING = {"success", "fail"}

_DELETE = "DeleteMessageBatch"
_HIDE = "ChangeMessageVisibilityBatch"
_DEAD_LETTER = "SendMessageBatch"

#: Unless a fault prevents it, a worker deletes the message of a finished run within this time.
_PROMPT_SECONDS = 2.0

#: A request may take this long from the worker to the proxy, which notes the time.
_SLACK_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of a message, as its task has noted it. ``outcome`` is None if the process died."""

    message_id: str
    worker: int  # pid of the main process
    pid: int
    received_at: float
    #: When the worker got the response with the message. None means at ``received_at``.
    arrived_at: float | None = None
    started_at: float
    ended_at: float | None = None
    outcome: str | None = None


@dataclass(frozen=True, kw_only=True)
class Call:
    """What happened to one message in one call to SQS. ``fault`` names the injected fault."""

    action: str
    worker: int
    at: float
    answered_at: float
    reached: bool = True  # SQS has carried out the call
    fault: str | None = None
    seconds: int | None = None  # the visibility timeout, if the call sets one


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A signal to one process of a worker, or to its main process and all its children."""

    at: float
    signal: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class History:
    """What happened to one message, and to all workers in the meantime."""

    visibility_timeout_seconds: float
    #: When SQS handed the message out.
    received_at: Sequence[float] = ()
    #: Calls about the message.
    calls: Sequence[Call] = ()
    #: Calls of all workers, about any message, whose responses were delayed by an injected fault.
    slow_calls: Sequence[Call] = ()
    kills: Sequence[Kill] = ()
    #: The beginning and the end of each time in which no worker could reach SQS.
    outages: Sequence[tuple[float, float]] = field(default=())


def extra_runs(runs: Iterable[Run]) -> tuple[Run | None, list[Run]]:
    """Return the run that settled a message first, and all runs that began later than this run."""
    ordered = sorted(runs, key=lambda run: run.started_at)
    settled = [run for run in ordered if run.outcome in SETTLING]
    if not settled:
        return None, []
    first = min(settled, key=lambda run: run.ended_at or 0.0)
    return first, [run for run in ordered if run.started_at > first.started_at]


def explain(extra: Run, settled: Run, history: History) -> str | None:
    """Name the injected fault because of which ``extra`` ran after ``settled`` had begun.

    Return None if there is no such fault. Then there is a bug.
    """
    first, second = sorted((settled, extra), key=lambda run: run.received_at)
    until = second.received_at  # from then on, two runs had the message
    if any(c.action == _DELETE and c.reached and c.at < until for c in history.calls):
        return None  # SQS had deleted the message before, so no fault explains this receive
    if first is settled and (found := _not_removed(extra, settled, until, history)):
        return found
    return _lapsed(first, until, history)


def explains_copies(history: History) -> bool:
    """Return whether an injected fault explains why a message became a dead letter twice.

    To lose no message, the worker first sends the dead letter and then deletes the message. If the
    response to either call is lost, or the worker dies in between, the next run sends a second
    dead letter.
    """
    removals = [c for c in history.calls if c.action in (_DELETE, _DEAD_LETTER)]
    return any(
        c.fault
        or _covered(history.outages, c.at - 1, c.answered_at + 1)
        or any(k.pid == c.worker and 0 <= k.at - c.at <= _PROMPT_SECONDS for k in history.kills)
        for c in removals
    )


def _not_removed(extra: Run, settled: Run, until: float, history: History) -> str | None:
    """Name the fault that kept the worker from deleting the message, or return None."""
    ended_at = settled.ended_at or settled.started_at
    deadline = ended_at + _PROMPT_SECONDS
    is_same_receive = extra.received_at == settled.received_at
    for kill in history.kills:
        if (
            kill.pid in (settled.worker, settled.pid)
            and settled.started_at <= kill.at <= deadline
            and kill.at <= (extra.started_at if is_same_receive else until)
        ):
            # Two runs of one receive: the pool did not know that the killed process had begun the
            # task, and has let another process begin it again.
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
    """Return whether the worker could not send the dead letter yet, and hid the message instead.

    A worker that starts while it cannot reach SQS does not know the dead-letter queue yet. It does
    not run the hidden message again, but another worker may receive and run it.
    """
    return any(began < ended_at for began, _ in history.outages) and any(
        c.action == _HIDE and c.worker == settled.worker and ended_at <= c.at <= until
        for c in history.calls
    )


def _lapsed(holder: Run, until: float, history: History) -> str | None:
    """Name the fault that kept the worker from renewing the visibility timeout, or return None.

    The faults must cover half of the time in which the worker should have renewed it.
    """
    holds = [(at, history.visibility_timeout_seconds) for at in history.received_at]
    holds += [
        (c.at, c.seconds) for c in history.calls if c.action == _HIDE and c.reached and c.seconds
    ]
    before = [(at, seconds) for at, seconds in holds if at < until - _SLACK_SECONDS]
    if not before:
        return None
    held_at, seconds = max(before, key=sum)
    if until < held_at + seconds - 1:
        return None  # SQS handed the message out although it was hidden
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
