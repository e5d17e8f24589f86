"""The gate's state machine, in virtual time."""

from __future__ import annotations

import math
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_sqs_backoff import Outcome
from celery_sqs_backoff.provider.health import (
    JITTER_FROM,
    JITTER_TO,
    LONGEST_RETRY_AFTER_SECONDS,
    PAUSE_SHARE,
    PROBE_EXPIRES_AFTER_SECONDS,
    Change,
    Health,
    Permission,
    State,
    Thresholds,
)

T = Thresholds()


class Middle:
    """Draws the middle, so that intervals are their mean."""

    def uniform(self, a: float, b: float, /) -> float:
        return (a + b) / 2


def fail(health: Health, number: int, now: float = 0.0, *, one_message: bool = False) -> None:
    for i in range(number):
        health.record("one" if one_message else f"m{i}", Outcome.RETRYABLE, now)


def opened(now: float = 0.0) -> Health:
    health = Health(T, Middle())
    fail(health, 20, now)
    assert health.state is State.OPEN
    return health


def test_it_is_closed_at_first_and_lets_everything_run() -> None:
    health = Health(T, Middle())
    assert health.allow("a", 0.0) is Permission.RUN
    assert health.state is State.CLOSED


def test_it_opens_at_the_given_number_of_failures_and_not_before() -> None:
    health = Health(T, Middle())
    fail(health, T.failures - 1)
    assert health.state is State.CLOSED
    assert health.record("last", Outcome.RETRYABLE, 0.0) is Change.OPENED
    assert health.allow("next", 0.0) is Permission.HIDE


@pytest.mark.parametrize("outcome", [Outcome.UNKNOWN, Outcome.NOT_PROCESSED])
def test_unknown_and_not_processed_never_open_it(outcome: Outcome) -> None:
    health = Health(T, Middle())
    for i in range(1000):
        assert health.record(f"m{i}", outcome, float(i)) is None
    assert health.state is State.CLOSED


def test_failures_of_one_message_never_open_it() -> None:
    health = Health(T, Middle())
    fail(health, 1000, one_message=True)
    assert health.state is State.CLOSED


def test_successes_between_the_failures_keep_it_closed() -> None:
    health = Health(T, Middle())
    for i in range(1000):
        health.record(f"m{i}", None if i % 3 == 0 else Outcome.RETRYABLE, i / 10)
    assert health.state is State.CLOSED


def test_it_takes_no_more_failures_after_a_success() -> None:
    """It took seven in a row: six of seven calls must have failed, and one had succeeded."""
    health = Health(T, Middle())
    health.record("sent", None, 0.0)
    for i in range(T.failures):
        assert health.state is State.CLOSED
        health.record(f"m{i}", Outcome.RETRYABLE, 100.0)
    assert health.state is State.OPEN


def test_one_probe_at_a_time() -> None:
    health = opened()
    assert health.allow("early", 4.9) is Permission.HIDE
    assert health.allow("probe", 5.0) is Permission.PROBE
    assert health.allow("other", 5.0) is Permission.HIDE
    assert health.allow("probe", 5.1) is Permission.PROBE, "SQS may show the probe twice"


def test_a_successful_probe_closes_it() -> None:
    health = opened()
    health.allow("probe", 5.0)
    assert health.record("other", None, 5.5) is None, "only the probe's own success closes it"
    assert health.record("probe", None, 6.0) is Change.CLOSED
    assert health.allow("next", 6.0) is Permission.RUN


def test_the_pause_is_a_sixth_of_the_outage_between_its_bounds() -> None:
    health, probes = opened(), []
    for _ in range(30):
        now = health.next_probe_at
        health.allow("probe", now)
        health.record("probe", Outcome.RETRYABLE, now)
        probes.append(now)
    pauses = [later - earlier for earlier, later in pairwise(probes)]
    assert probes[:4] == [5, 10, 15, 20]
    for began, pause in zip(probes, pauses, strict=False):
        assert pause == pytest.approx(min(60, max(5, began / 6)))
    assert pauses[-1] == 60


def test_a_gate_that_opens_late_in_an_outage_probes_seldom() -> None:
    health = Health(T, Middle())
    health.told_open(opened_at=0.0, next_probe_at=1000.0)
    health.allow("probe", 1000.0)
    health.record("probe", Outcome.RETRYABLE, 1000.0)
    assert health.next_probe_at == 1060.0


@pytest.mark.parametrize("outcome", [Outcome.UNKNOWN, Outcome.NOT_PROCESSED])
def test_a_probe_that_proves_nothing_is_repeated(outcome: Outcome) -> None:
    health = opened()
    health.allow("probe", 5.0)
    assert health.record("probe", outcome, 6.0) is None
    assert (health.state, health.next_probe_at) == (State.OPEN, 11.0)


def test_a_probe_that_does_not_run_is_replaced() -> None:
    health = opened()
    health.allow("probe", 5.0)
    health.abandon("other", 5.5)
    assert health.state is State.PROBING
    health.abandon("probe", 6.0)
    assert health.allow("second", 11.0) is Permission.PROBE


def test_a_probe_that_is_never_reported_is_replaced() -> None:
    health = opened()
    health.allow("lost", 5.0)
    late = 5.0 + PROBE_EXPIRES_AFTER_SECONDS
    assert not health.needs_probe(late - 0.1)
    assert health.needs_probe(late)
    assert health.allow("second", late) is Permission.PROBE


def test_the_next_probe_respects_retry_after_but_not_for_ever() -> None:
    health = opened()
    health.allow("probe", 5.0)
    health.record("probe", Outcome.RETRYABLE, 6.0, retry_after=120.0)
    assert health.next_probe_at == 126.0
    health.allow("probe", 126.0)
    health.record("probe", Outcome.RETRYABLE, 126.0, retry_after=1e9)
    assert health.next_probe_at == 126.0 + LONGEST_RETRY_AFTER_SECONDS


def test_a_success_of_an_earlier_call_makes_the_probe_due_at_once() -> None:
    health = opened()
    health.record("begun before", None, 1.0)
    assert health.state is State.OPEN
    assert health.allow("probe", 1.0) is Permission.PROBE


def test_failures_of_earlier_calls_do_not_postpone_the_probe() -> None:
    health = opened()
    fail(health, 100, 4.0)
    assert health.next_probe_at == 5.0


def test_while_it_recovers_refusals_beside_successes_keep_it_closed() -> None:
    """A provider that takes 60 calls a second refuses the rest of each second in one piece."""
    health = Health(T, Middle())
    for second in range(100):
        health.record(f"sent {second}", None, float(second), is_slowed=True)
        for i in range(20):
            refused = f"refused {second} {i}"
            health.record(refused, Outcome.RETRYABLE, second + 0.5, is_slowed=True)
    assert health.state is State.CLOSED


def test_while_it_recovers_a_provider_that_answers_nothing_is_down_again() -> None:
    health = Health(T, Middle())
    health.record("sent", None, 100.0, is_slowed=True)
    for i in range(20):
        health.record(f"refused {i}", Outcome.RETRYABLE, 104.9, is_slowed=True)
    assert health.state is State.CLOSED
    changed = health.record("refused", Outcome.RETRYABLE, 105.0, is_slowed=True)
    assert changed is Change.OPENED


def calls_during(outage: float, gap: float, seed: int) -> int:
    """Calls during an outage, if a message comes due every ``gap`` seconds and fails at once."""
    health, now, calls, number = Health(T, Random(seed)), 0.0, 0, 0
    while now < outage:
        number += 1
        if health.allow(f"m{number}", now) is not Permission.HIDE:
            calls += 1
            health.record(f"m{number}", Outcome.RETRYABLE, now)
        now += gap
    return calls


@given(
    outage=st.floats(1.0, 5e4),
    gap=st.floats(5.0, 60.0) | st.floats(0.05, 1.0).filter(lambda gap: gap > 0),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_calls_during_an_outage_are_bounded_by_threshold_and_probes(
    outage: float, gap: float, seed: int
) -> None:
    outage = min(outage, 20_000 * gap)
    shortest = T.probe_interval * JITTER_FROM
    steps = math.log(T.longest_probe_interval / T.probe_interval, 1 + PAUSE_SHARE * JITTER_FROM)
    growing = T.probe_interval / PAUSE_SHARE / shortest + steps + 1
    probes = growing + outage / (T.longest_probe_interval * JITTER_FROM) + 1
    assert calls_during(outage, gap, seed) <= T.failures + probes


class Fleet:
    """A random history of a health, in which invariants are checked at each step."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.health = Health(T, self.rng)
        self.now = 0.0
        self.running: dict[str, bool] = {}

    def step(self, number: int) -> None:
        health, rng = self.health, self.rng
        self.now += rng.choice([0.0, 0.1, 3.0, 30.0, 700.0])
        if self.running and rng.random() < 0.6:
            message = rng.choice(list(self.running))
            is_probe = self.running.pop(message)
            if rng.random() < 0.1:
                health.abandon(message, self.now)
            else:
                outcome = rng.choice([None, *[Outcome.RETRYABLE] * 4, *Outcome])
                before = health.state
                health.record(message, outcome, self.now, retry_after=rng.choice([None, 100.0]))
                if before is not State.CLOSED and health.state is State.CLOSED:
                    assert is_probe, "only a probe closes the gate"
                    assert outcome is None
        else:
            message = f"m{number}"
            permission = health.allow(message, self.now)
            if permission is not Permission.HIDE:
                self.running[message] = permission is Permission.PROBE
        self.check()

    def check(self) -> None:
        health = self.health
        if health.state is State.OPEN:
            longest = max(T.longest_probe_interval * JITTER_TO, LONGEST_RETRY_AFTER_SECONDS)
            assert health.next_probe_at <= self.now + longest, "a probe is always planned"
        later = self.now + PROBE_EXPIRES_AFTER_SECONDS + LONGEST_RETRY_AFTER_SECONDS
        if health.state is not State.CLOSED:
            copy = Health(T, self.rng)
            copy.__dict__.update(health.__dict__)
            assert copy.allow("asks later", later) is Permission.PROBE


@given(seed=st.integers(0, 10_000))
@settings(max_examples=80, deadline=None)
def test_it_is_never_open_without_a_probe_to_come(seed: int) -> None:
    fleet = Fleet(seed)
    for number in range(200):
        fleet.step(number)


@given(st.lists(st.sampled_from([*Outcome]), max_size=300), st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_one_message_never_opens_it_whatever_it_does(outcomes: list[Outcome], seed: int) -> None:
    health = Health(T, Random(seed))
    for i, outcome in enumerate(outcomes):
        health.record("the same", outcome, float(i))
        assert health.state is State.CLOSED
