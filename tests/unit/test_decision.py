"""How a worker settles a message after a run of its task: delete, hide or dead letter.

This depends on how the run ended, on the decision of the process that ran the task, and on the
budgets, such as ``max_retries`` and ``retry_for``.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_sqs_backoff import Outcome, Verdict
from celery_sqs_backoff.retry.budget import GiveUpReason, Standing
from celery_sqs_backoff.retry.decision import (
    DeadLetter,
    Delete,
    End,
    Facts,
    GiveBack,
    Hide,
    RunEnd,
    decide,
    decide_failure,
)

HOUR = 3600.0
UNKNOWN, RETRYABLE = Outcome.UNKNOWN, Outcome.RETRYABLE


def facts(*, standing=None, **changes):
    defaults = {
        "standing": Standing(**(standing or {})),
        "max_retries": None,
        "retry_for": 36 * HOUR,
        "crash_budget": 3,
        "delay": 7.0,
    }
    return Facts(**defaults | changes)


def dead_letter(reason, outcome=UNKNOWN):
    return DeadLetter(reason, outcome)


@pytest.mark.parametrize(
    ("end", "settle"),
    [
        (End.RETURNED, Delete()),
        (End.RAISED, dead_letter(GiveUpReason.NOT_RETRYABLE)),
        (End.RETRY_ASKED, Delete()),
        (End.IGNORED, Delete()),
        (End.REJECTED, dead_letter(GiveUpReason.REJECTED)),
        (End.REQUEUED, Hide(7.0, RETRYABLE)),
        (End.NOT_BEGUN, Hide(7.0, RETRYABLE)),
        (End.PROCESS_LOST, Hide(7.0, UNKNOWN)),
        (End.TIME_LIMIT, Hide(7.0, UNKNOWN)),
        (End.ABORTED, Hide(7.0, UNKNOWN)),
        (End.CANCELLED, GiveBack()),
        (End.REVOKED, Delete()),
        (End.REFUSED, dead_letter(GiveUpReason.NOT_RETRYABLE)),
    ],
    ids=lambda value: value.name if isinstance(value, End) else "",
)
def test_end_without_decision(end, settle):
    """If the process decided nothing, the worker settles the message by how the run ended."""
    assert decide(RunEnd(end), facts()) == settle


@pytest.mark.parametrize("end", End, ids=lambda end: end.name)
def test_decision_of_process(end):
    """The worker follows the decision of the process, however the run ended."""
    assert decide(RunEnd(end, Hide(42)), facts()) == Hide(42, RETRYABLE)
    decision = DeadLetter(GiveUpReason.MAX_RETRIES, RETRYABLE)
    assert decide(RunEnd(end, decision), facts()) == dead_letter(
        GiveUpReason.MAX_RETRIES, RETRYABLE
    )


@pytest.mark.parametrize("end", End, ids=lambda end: end.name)
def test_no_dead_letter_queue(end):
    """Without a dead-letter queue, the worker deletes the message that it gives up."""
    kept = decide(RunEnd(end), facts())
    settle = decide(RunEnd(end), facts(keeps_dead_letters=False))
    if isinstance(kept, DeadLetter):
        assert settle == Delete(kept.reason, kept.outcome)
    else:
        assert settle == kept


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (End.PROCESS_LOST, GiveUpReason.WORKER_LOST),
        (End.TIME_LIMIT, GiveUpReason.TIME_LIMIT),
        (End.ABORTED, GiveUpReason.ABORTED),
    ],
)
def test_crash_budget(end, reason):
    """After a crash the message is hidden for a retry, until the crash budget is spent."""
    assert isinstance(decide(RunEnd(end), facts(crashes=2)), Hide)
    assert decide(RunEnd(end), facts(crashes=3)) == dead_letter(reason)


@pytest.mark.parametrize(
    "end", [End.PROCESS_LOST, End.TIME_LIMIT, End.ABORTED, End.REQUEUED, End.NOT_BEGUN]
)
@pytest.mark.parametrize(
    ("standing", "budgets", "reason"),
    [
        ({"retries": 2}, {"max_retries": 2}, GiveUpReason.MAX_RETRIES),
        ({"elapsed": 36 * HOUR}, {}, GiveUpReason.RETRY_FOR),
        ({}, {"retry_for": 5.0}, GiveUpReason.DELAY_TOO_LONG),
        ({"is_last_receive": True}, {}, GiveUpReason.MAX_RECEIVE_COUNT),
        ({"is_expiring": True}, {}, GiveUpReason.RETENTION),
    ],
    ids=["max_retries", "retry_for", "too late", "last receive", "retention"],
)
def test_budgets_without_decision(end, standing, budgets, reason):
    """If the process decided nothing and a budget is spent, the worker gives the message up."""
    settle = decide(RunEnd(end), facts(standing=standing, **budgets))
    assert isinstance(settle, DeadLetter)
    assert settle.reason is reason


def test_delay_after_crash():
    """After a hard time limit, the message stays hidden until its process has been killed."""
    assert decide(RunEnd(End.TIME_LIMIT), facts(delay=0.0)) == Hide(2.0, UNKNOWN)


@pytest.mark.parametrize(
    ("verdict", "decision"),
    [
        (Verdict(RETRYABLE), Hide(7.0)),
        (Verdict(UNKNOWN, safe_to_repeat=True), Hide(7.0, UNKNOWN)),
        (Verdict(UNKNOWN), DeadLetter(GiveUpReason.NOT_RETRYABLE, UNKNOWN)),
        (
            Verdict(Outcome.NOT_PROCESSED),
            DeadLetter(GiveUpReason.NOT_RETRYABLE, Outcome.NOT_PROCESSED),
        ),
    ],
)
def test_decision_of_verdict(verdict, decision):
    """A verdict decides whether the message is retried or given up."""
    assert (
        decide_failure(verdict, Standing(), max_retries=None, retry_for=None, delay=7.0) == decision
    )


standings = st.builds(
    Standing,
    retries=st.integers(0, 2000),
    elapsed=st.floats(0, 1e7),
    is_last_receive=st.booleans(),
    is_overdue=st.booleans(),
    is_expiring=st.booleans(),
)
decisions = (
    st.none()
    | st.builds(Hide, st.integers(1, 43_000))
    | st.builds(DeadLetter, st.sampled_from(GiveUpReason), st.sampled_from(Outcome))
)
any_facts = st.builds(
    Facts,
    standing=standings,
    max_retries=st.none() | st.integers(0, 10),
    retry_for=st.none() | st.floats(0, 1e6),
    crash_budget=st.integers(1, 5),
    crashes=st.integers(0, 10),
    delay=st.floats(0, 43_000),
    keeps_dead_letters=st.booleans(),
)


@given(end=st.sampled_from(End), decision=decisions, known=any_facts)
def test_one_settlement_per_end(end, decision, known):
    """A message is deleted without a reason only if its task needs no further run.

    It is hidden only if SQS allows another receive. It becomes a dead letter only if there is a
    place for dead letters.
    """
    settle = decide(RunEnd(end, decision), known)
    if isinstance(settle, Delete) and settle.reason is None:
        assert decision is None
        assert end in {End.RETURNED, End.RETRY_ASKED, End.IGNORED, End.REVOKED}
    if isinstance(settle, Hide):
        assert settle.seconds > 0 or end in {End.REQUEUED, End.NOT_BEGUN}
        standing = known.standing
        assert not standing.is_last_receive
        if decision is None:
            assert known.max_retries is None or standing.retries < known.max_retries
    if isinstance(settle, DeadLetter):
        assert known.keeps_dead_letters
