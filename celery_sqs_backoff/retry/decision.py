"""What becomes of a message when a run of its task has ended: one table.

Both processes ask it. The process that ran the task asks what the failure is worth
(:func:`word_for`) and hands over the answer, the task's *word*. The worker's main process asks
what to do with the message (:func:`decide`) before any of Celery's own code runs, so nothing that
fails later, such as a result backend or a user's hook, can change the answer.

=================  ===========================================  ================================
how the run ended  without a word                               with a word
=================  ===========================================  ================================
returned           delete                                       (returning is the word)
raised             dead letter, not retryable                   hide, or dead letter
retry asked        delete: Celery has published a copy          hide
ignored            delete                                       dead letter: its chord is untold
rejected           dead letter
requeued           hide within the budgets, else dead letter
not begun          as requeued: Celery failed before the run
process lost       hide within crash budget and budgets,        the word
                   else dead letter
hard time limit    as process lost                              the word
aborted            as process lost                              the word
cancelled          give back at once                            the word
revoked            delete: expired, revoked or terminated
refused            (a budget was used up before)                dead letter
not started        give back: this receive was no attempt
=================  ===========================================  ================================

A dead letter is a delete where the task, or the queue, has no place for dead letters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from .budget import GiveUpReason, Standing, exhausted
from .outcomes import Outcome, Verdict

#: On prefork the process is killed only after the report of its time limit; its message must not
#: come back before it is gone (TERM, 0.1 s, KILL).
MIN_CRASH_DELAY_SECONDS: Final = 2.0


class End(Enum):
    """How a run ended."""

    RETURNED = "returned"
    RAISED = "raised"
    RETRY_ASKED = "retry asked"
    IGNORED = "ignored"
    REJECTED = "rejected"
    REQUEUED = "requeued"
    NOT_BEGUN = "not begun"
    PROCESS_LOST = "process lost"
    TIME_LIMIT = "hard time limit"
    #: Something other than an ``Exception``, or a ``MemoryError``: nobody knows how far it got.
    ABORTED = "aborted"
    #: The worker ended the run itself: a cold shutdown, or a lost connection.
    CANCELLED = "cancelled"
    REVOKED = "revoked"
    REFUSED = "refused"
    NOT_STARTED = "not started"


@dataclass(frozen=True, slots=True)
class RetryIn:
    """The task's word: run it again in so many seconds."""

    seconds: float
    outcome: Outcome = Outcome.RETRYABLE
    #: What the provider asked for, part of ``seconds``; ``None`` = nothing.
    retry_after: float | None = None
    #: The task has named the delay, by ``countdown`` or ``eta``: nothing brings it back earlier.
    is_named: bool = False


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The task's word: do not run it again, for this reason."""

    reason: GiveUpReason
    outcome: Outcome


Word: TypeAlias = RetryIn | GiveUp


class Reply(Enum):
    """What a run shows of its task's provider."""

    #: It took the call, or said that it never will (NOT_PROCESSED).
    ANSWERED = "answered"
    #: It is there, and refuses the call for now: the failure names a Retry-After.
    REFUSED = "refused"
    #: The call failed, and one of the task's rules knows the error: in doubt or not.
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of one run, the task's word, and the provider's reply. ``None`` = there is none."""

    end: End
    word: Word | None = None
    reply: Reply | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What must be known beside the end of the run.

    Arguments:
        standing: where the message stands.
        max_retries, retry_for, crash_budget: the task's budgets.
        crashes: runs of the message that are known to be lost, this one included if it is.
        delay: seconds, drawn from the task's policy for this failure; only where
            :func:`needs_delay` says so.
        keeps_dead_letters: the task wants dead letters, and the queue has a place for them, or may
            have: its attributes could not be read yet.
    """

    standing: Standing
    max_retries: int | None
    retry_for: float | None
    crash_budget: int
    crashes: int = 0
    delay: float = 0.0
    keeps_dead_letters: bool = True


#: For ends that need none: see :func:`needs_facts`.
NO_FACTS: Final = Facts(standing=Standing(), max_retries=None, retry_for=None, crash_budget=1)


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete the message. ``reason`` and ``outcome`` are set if it was given up."""

    reason: GiveUpReason | None = None
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True)
class Hide:
    """Hide the message for so many seconds from now on, then let it run again."""

    seconds: float
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Send the message to the dead-letter queue, with the reason on it."""

    reason: GiveUpReason
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Let another worker receive the message at once.

    ``started`` is false if the task has not been started: then the receive was no attempt.
    """

    started: bool = True


Settle: TypeAlias = Delete | Hide | DeadLetter | GiveBack


def word_for(
    verdict: Verdict,
    standing: Standing,
    *,
    max_retries: int | None,
    retry_for: float | None,
    delay: float,
) -> Word:
    """Say what a failure is worth, in the process that ran the task.

    Arguments:
        verdict: what the failure means.
        standing, max_retries, retry_for: as for :func:`.budget.exhausted`.
        delay: seconds until a retry would begin, the verdict's ``retry_after`` included.
    """
    if not verdict.wants_retry:
        return GiveUp(GiveUpReason.NOT_RETRYABLE, verdict.outcome)
    reason = exhausted(standing, max_retries=max_retries, retry_for=retry_for, delay=delay)
    if reason is not None:
        return GiveUp(reason, verdict.outcome)
    return RetryIn(delay, verdict.outcome, verdict.retry_after)


def needs_facts(ended: Ended) -> bool:
    """Return whether :func:`decide` looks at any fact beside the end itself."""
    return ended.word is not None or ended.end not in _DECIDED_BY_THE_END


def needs_delay(ended: Ended) -> bool:
    """Return whether :func:`decide` may hide the message for the delay of the task's policy."""
    return ended.word is None and ended.end in _HIDDEN_WITHOUT_A_WORD


def decide(ended: Ended, facts: Facts) -> Settle:
    """Say what becomes of the message. A word, once given, stands."""
    if isinstance(ended.word, RetryIn):
        return Hide(ended.word.seconds, ended.word.outcome)
    if isinstance(ended.word, GiveUp):
        return _give_up(facts, ended.word.reason, ended.word.outcome)
    return _WITHOUT_A_WORD[ended.end](facts)


def _give_up(facts: Facts, reason: GiveUpReason, outcome: Outcome) -> Settle:
    if facts.keeps_dead_letters:
        return DeadLetter(reason, outcome)
    return Delete(reason, outcome)


def _delete(facts: Facts) -> Settle:
    return Delete()


def _not_retryable(facts: Facts) -> Settle:
    return _give_up(facts, GiveUpReason.NOT_RETRYABLE, Outcome.UNKNOWN)


def _rejected(facts: Facts) -> Settle:
    return _give_up(facts, GiveUpReason.REJECTED, Outcome.UNKNOWN)


def _comes_back(when_exhausted: Outcome) -> Callable[[Facts], Settle]:
    def rule(facts: Facts) -> Settle:
        reason = _exhausted(facts, facts.delay)
        if reason is not None:
            return _give_up(facts, reason, when_exhausted)
        return Hide(facts.delay, Outcome.RETRYABLE)

    return rule


def _crashed(when_exhausted: GiveUpReason) -> Callable[[Facts], Settle]:
    def rule(facts: Facts) -> Settle:
        delay = max(MIN_CRASH_DELAY_SECONDS, facts.delay)
        too_many = facts.crashes >= facts.crash_budget
        reason = when_exhausted if too_many else _exhausted(facts, delay)
        if reason is not None:
            return _give_up(facts, reason, Outcome.UNKNOWN)
        return Hide(delay, Outcome.UNKNOWN)

    return rule


def _exhausted(facts: Facts, delay: float) -> GiveUpReason | None:
    return exhausted(
        facts.standing, max_retries=facts.max_retries, retry_for=facts.retry_for, delay=delay
    )


def _give_back(facts: Facts) -> Settle:
    return GiveBack()


def _give_back_unstarted(facts: Facts) -> Settle:
    return GiveBack(started=False)


_WITHOUT_A_WORD: Mapping[End, Callable[[Facts], Settle]] = {
    End.RETURNED: _delete,
    End.RAISED: _not_retryable,
    End.RETRY_ASKED: _delete,
    End.IGNORED: _delete,
    End.REJECTED: _rejected,
    End.REQUEUED: _comes_back(Outcome.UNKNOWN),  # the task has not said why
    End.NOT_BEGUN: _comes_back(Outcome.RETRYABLE),
    End.PROCESS_LOST: _crashed(GiveUpReason.WORKER_LOST),
    End.TIME_LIMIT: _crashed(GiveUpReason.TIME_LIMIT),
    End.ABORTED: _crashed(GiveUpReason.ABORTED),
    End.CANCELLED: _give_back,
    End.REVOKED: _delete,
    End.REFUSED: _not_retryable,
    End.NOT_STARTED: _give_back_unstarted,
}

#: Those of most messages are among them, so that a success costs no more than it must.
_DECIDED_BY_THE_END: Final = frozenset(
    {End.RETURNED, End.RETRY_ASKED, End.IGNORED, End.REVOKED, End.NOT_STARTED}
)

_HIDDEN_WITHOUT_A_WORD: Final = frozenset(
    {End.REQUEUED, End.NOT_BEGUN, End.PROCESS_LOST, End.TIME_LIMIT, End.ABORTED}
)
