"""Decides how the worker settles a message after a run of its task, by one table.

To settle a message, the worker deletes it, hides it until a retry, sends it to the dead-letter
queue, or gives it back, so that any worker can receive it. If the task fails, the process that ran
it decides (:func:`decide_failure`) and reports its decision. The worker's main process then makes
the final decision (:func:`decide`). It does so before Celery's own code in the main process handles
the end of the run. So a later failure, for example of a result backend or a user's hook, cannot
change the decision.

=================  ===========================================  ================================
how the run ended  without a decision                           with a decision of its process
=================  ===========================================  ================================
returned           delete                                       dead letter: next task not sent
raised             dead letter, not retryable                   hide, or dead letter
retry asked        delete: Celery has published a copy          hide
ignored            delete                                       dead letter: chord was not told
rejected           dead letter
requeued           hide within the budgets, else dead letter
not begun          as requeued: Celery failed before the run
process lost       hide within crash budget and budgets,        the decision
                   else dead letter
hard time limit    as process lost                              the decision
aborted            as process lost                              the decision
cancelled          give back at once                            the decision
revoked            delete: expired, revoked or terminated
refused            no run: a budget was used up before          dead letter
=================  ===========================================  ================================

If the task or the queue keeps no dead letters, the worker deletes the message instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from .budget import GiveUpReason, Standing, find_reason
from .outcomes import Outcome, Verdict

#: The prefork pool first reports a hard time limit and then kills the process (TERM, 0.1 s, KILL).
#: The message must not come back before that process is gone.
MIN_CRASH_DELAY_SECONDS: Final = 2.0


class _Fate(Enum):
    """How a message is settled if the process that ran its task has reported no decision."""

    DELETE = 1
    GIVE_UP = 2
    COME_BACK = 3
    GIVE_BACK = 4


class End(Enum):
    """How a run ended. The value is the text in logs and in the table of this module.

    Attributes:
        fate: how the message is settled if the task's process has reported no decision.
        reason: why the message is given up, or ``None``. After a crash it is given up for this
            reason only when ``crash_budget`` is used up.
        is_run: whether the worker reports the run's outcome. False if the task did not begin, or if
            the worker or a revoke ended the run.
        is_success: whether the task returned or raised ``Ignore``.
        is_crash: whether the end counts against ``crash_budget``.
    """

    RETURNED = "returned", _Fate.DELETE
    RAISED = "raised", _Fate.GIVE_UP, GiveUpReason.NOT_RETRYABLE
    RETRY_ASKED = "retry asked", _Fate.DELETE
    IGNORED = "ignored", _Fate.DELETE
    REJECTED = "rejected", _Fate.GIVE_UP, GiveUpReason.REJECTED
    REQUEUED = "requeued", _Fate.COME_BACK
    NOT_BEGUN = "not begun", _Fate.COME_BACK, None, False
    PROCESS_LOST = "process lost", _Fate.COME_BACK, GiveUpReason.WORKER_LOST
    TIME_LIMIT = "hard time limit", _Fate.COME_BACK, GiveUpReason.TIME_LIMIT
    #: The task raised a ``MemoryError``, or an exception that is no subclass of ``Exception``. It
    #: may have done a part of its work.
    ABORTED = "aborted", _Fate.COME_BACK, GiveUpReason.ABORTED
    #: The worker itself ended the run, at a cold shutdown or after a lost connection.
    CANCELLED = "cancelled", _Fate.GIVE_BACK, None, False
    REVOKED = "revoked", _Fate.DELETE, None, False
    REFUSED = "refused", _Fate.GIVE_UP, GiveUpReason.NOT_RETRYABLE, False

    fate: _Fate
    reason: GiveUpReason | None
    is_run: bool
    is_success: bool
    is_crash: bool

    def __new__(
        cls, text: str, fate: _Fate, reason: GiveUpReason | None = None, is_run: bool = True
    ) -> End:
        end = object.__new__(cls)
        end._value_ = text
        end.fate, end.reason, end.is_run = fate, reason, is_run
        end.is_success = text in ("returned", "ignored")
        end.is_crash = fate is _Fate.COME_BACK and reason is not None
        return end


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete the message. ``reason`` and ``outcome`` are set only if the message is given up."""

    reason: GiveUpReason | None = None
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True)
class Hide:
    """Hide the message for ``seconds``. Then its task runs again."""

    seconds: float
    outcome: Outcome = Outcome.RETRYABLE
    #: The part of ``seconds`` that the provider asked for, or ``None`` if it did not ask.
    retry_after: float | None = None
    #: Whether the task set the delay by ``countdown`` or ``eta``. The worker never shortens such a
    #: delay.
    is_named: bool = False


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Send the message to the dead-letter queue, with the reason on it."""

    reason: GiveUpReason
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Show the message again, so that any worker can receive it."""


Settle: TypeAlias = Delete | Hide | DeadLetter | GiveBack


class Reply(Enum):
    """How the provider replied to the task's call, as far as the end of the run shows it."""

    #: The provider processed the call, or refused it for good (NOT_PROCESSED).
    ANSWERED = "answered"
    #: The provider is up, but refused the call for now, and asked to wait (Retry-After).
    REFUSED = "refused"
    #: The call failed with an error that one of the task's rules knows. The provider may be down.
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The end of a run, with any decision of the task's process and any reply of the provider."""

    end: End
    decision: Hide | DeadLetter | None = None
    reply: Reply | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Everything that a decision needs, apart from the end of the run.

    Arguments:
        standing: the message's use of its budgets so far.
        max_retries, retry_for, crash_budget: the task's budgets.
        crashes: number of the message's runs that are known to have crashed, the last one included.
        delay: seconds, drawn from the task's policy for this failure. Needed only if
            :func:`needs_delay` returns true.
        keeps_dead_letters: whether the task wants dead letters and the queue has a dead-letter
            queue. If the worker could not read the queue's attributes, the queue counts as having
            one.
    """

    standing: Standing
    max_retries: int | None
    retry_for: float | None
    crash_budget: int
    crashes: int = 0
    delay: float = 0.0
    keeps_dead_letters: bool = True


#: Placeholder for ends about which :func:`decide` needs no facts. See :func:`needs_facts`.
NO_FACTS: Final = Facts(standing=Standing(), max_retries=None, retry_for=None, crash_budget=1)


def decide_failure(
    verdict: Verdict,
    standing: Standing,
    *,
    max_retries: int | None,
    retry_for: float | None,
    delay: float,
) -> Hide | DeadLetter:
    """Decide whether to retry a failed task, in the process that ran it.

    Arguments:
        verdict: the verdict on the failure.
        standing, max_retries, retry_for: as for :func:`.budget.find_reason`.
        delay: seconds until a retry would begin, the verdict's ``retry_after`` included.
    """
    if not verdict.wants_retry:
        return DeadLetter(GiveUpReason.NOT_RETRYABLE, verdict.outcome)
    reason = find_reason(standing, max_retries=max_retries, retry_for=retry_for, delay=delay)
    if reason is not None:
        return DeadLetter(reason, verdict.outcome)
    return Hide(delay, verdict.outcome, verdict.retry_after)


def needs_facts(ended: RunEnd) -> bool:
    """Return whether :func:`decide` needs :class:`Facts` about this end.

    For some ends, such as a success, ``decide`` needs no facts, and the caller saves the time to
    look them up.
    """
    return ended.decision is not None or ended.end.fate is not _Fate.DELETE


def needs_delay(ended: RunEnd) -> bool:
    """Return whether :func:`decide` needs a delay from the task's policy."""
    return ended.decision is None and ended.end.fate is _Fate.COME_BACK


def decide(ended: RunEnd, facts: Facts) -> Settle:
    """Decide how the worker settles the message.

    A decision of the task's process is kept, with two exceptions. If the queue allows no further
    receive, the message becomes a dead letter instead of being hidden. If dead letters are not
    kept, a message that would become one is deleted.
    """
    settle = ended.decision or _decide_end(ended.end, facts)
    if isinstance(settle, Hide) and facts.standing.is_last_receive:
        settle = DeadLetter(GiveUpReason.MAX_RECEIVE_COUNT, settle.outcome)
    if isinstance(settle, DeadLetter) and not facts.keeps_dead_letters:
        return Delete(settle.reason, settle.outcome)
    return settle


def _decide_end(end: End, facts: Facts) -> Settle:
    """Decide about an end if the task's process has reported no decision."""
    if end.fate is _Fate.DELETE:
        return Delete()
    if end.fate is _Fate.GIVE_BACK:
        return GiveBack()
    if end.fate is _Fate.GIVE_UP:
        return DeadLetter(end.reason or GiveUpReason.NOT_RETRYABLE, Outcome.UNKNOWN)

    is_crash = end.is_crash
    delay = max(MIN_CRASH_DELAY_SECONDS, facts.delay) if is_crash else facts.delay
    reason = find_reason(
        facts.standing, max_retries=facts.max_retries, retry_for=facts.retry_for, delay=delay
    )
    if is_crash and facts.crashes >= facts.crash_budget:
        reason = end.reason
    if reason is None:
        return Hide(delay, Outcome.UNKNOWN if is_crash else Outcome.RETRYABLE)
    # A task that requeues its message does not say whether it has done its work, hence UNKNOWN.
    return DeadLetter(reason, Outcome.RETRYABLE if end is End.NOT_BEGUN else Outcome.UNKNOWN)
