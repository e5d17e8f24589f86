"""What each delay policy promises: first values, bounds, spread, and which arguments it refuses."""

import math
import pickle
import random
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from celery_sqs_backoff.retry.policies import (
    DecorrelatedJitter,
    EqualJitter,
    Exponential,
    FullJitter,
    Policy,
    Schedule,
)

GROWING: list[Any] = [FullJitter, EqualJitter, DecorrelatedJitter, Exponential]
ALL: list[Any] = [*(cls() for cls in GROWING), Schedule([1, 5, timedelta(minutes=1)])]


def name_of(value: Any) -> str | None:
    if isinstance(value, Policy):
        return type(value).__name__
    return getattr(value, "__name__", None)


attempts = st.integers(min_value=1, max_value=300)
seeds = st.integers(min_value=0, max_value=2**32)


@st.composite
def growing_policies(draw: st.DrawFn) -> Any:
    base = draw(st.floats(min_value=0.001, max_value=1e5))
    cap = base * draw(st.floats(min_value=1, max_value=1e5))
    return draw(st.sampled_from(GROWING))(base=base, cap=cap)


any_policy = growing_policies() | st.builds(
    Schedule, st.lists(st.floats(min_value=0, max_value=1e6), min_size=1, max_size=10)
)


class Highest:
    """A random source whose every draw is the highest legal one."""

    def uniform(self, a: float, b: float) -> float:
        return b


class Lowest:
    """A random source whose every draw is the lowest legal one."""

    def uniform(self, a: float, b: float) -> float:
        return a


# First values


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Exponential(), [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3600, 3600]),
        (FullJitter(), [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3600, 3600]),
        (EqualJitter(), [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3600, 3600]),
        (DecorrelatedJitter(), [6, 18, 54, 162, 486, 1458, 3600, 3600]),
        (Exponential(base=timedelta(minutes=1), cap=timedelta(minutes=3)), [60, 120, 180, 180]),
        (Exponential(base=0.5, cap=0.5), [0.5, 0.5]),
        (Schedule([1, 5, timedelta(minutes=1)]), [1, 5, 60, 60, 60]),
        (Schedule([10, 0]), [10, 0, 0]),
    ],
    ids=repr,
)
def test_first_ceilings(policy, expected):
    """The ceiling of an attempt, its longest delay, follows the formula of the policy."""
    assert [policy.ceiling(n) for n in range(1, len(expected) + 1)] == expected


@pytest.mark.parametrize(
    ("policy", "lowest"),
    [
        (FullJitter(), [0, 0, 0, 0]),
        (EqualJitter(), [1, 2, 4, 8]),
        (DecorrelatedJitter(), [2, 2, 2, 2]),
        (Exponential(), [2, 4, 8, 16]),
        (Schedule([3, 1]), [3, 1, 1, 1]),
    ],
    ids=name_of,
)
def test_range_of_delay(policy, lowest):
    """A delay lies between the lowest value of the formula and the ceiling."""
    assert [policy.delay(n, Lowest()) for n in (1, 2, 3, 4)] == lowest
    assert [policy.delay(n, Highest()) for n in (1, 2, 3, 4)] == [
        policy.ceiling(n) for n in (1, 2, 3, 4)
    ]


# Bounds


@given(policy=any_policy, attempt=attempts, seed=seeds)
def test_delay_within_ceiling(policy, attempt, seed):
    """No delay is negative or longer than its ceiling."""
    assert 0 <= policy.delay(attempt, random.Random(seed)) <= policy.ceiling(attempt)
    assert 0 <= policy.delay_for(str(seed), attempt) <= policy.ceiling(attempt)


@given(policy=any_policy, attempt=attempts)
@example(policy=DecorrelatedJitter(base=7.7), attempt=2)  # 3 * (3 * 7.7) > 7.7 * 9, in floats
def test_highest_draw(policy, attempt):
    """The highest draw gives no delay above the ceiling, not even by a rounding error."""
    assert policy.delay(attempt, Highest()) <= policy.ceiling(attempt)


@given(policy=growing_policies(), attempt=attempts)
def test_ceiling_rises_to_cap(policy, attempt):
    """The ceiling never falls from one attempt to the next and never exceeds the cap."""
    assert policy.ceiling(attempt) <= policy.ceiling(attempt + 1) <= policy.cap


@pytest.mark.parametrize("attempt", [1_024, 10_000, 10**400])
@pytest.mark.parametrize("policy", ALL, ids=name_of)
def test_ten_thousand_failures(policy, attempt):
    """A message that failed ten thousand times still gets a delay.

    2**10000 is no float, so the naive formula raises OverflowError.
    """
    assert policy.ceiling(attempt) in (3600, 60)
    if attempt <= 10_000:  # a chain of more draws takes too long
        assert 0 <= policy.delay(attempt, random.Random(1)) <= policy.ceiling(attempt)
        assert 0 <= policy.delay_for("a message", attempt) <= policy.ceiling(attempt)


# Spread


@pytest.mark.parametrize(
    ("policy", "expected_mean"), [(FullJitter(), 1800), (EqualJitter(), 2700)], ids=name_of
)
def test_cap_before_jitter(policy, expected_mean):
    """A policy applies the cap before the jitter.

    If random delays were cut off at the cap, most messages of a long outage would come back at
    the same time.
    """
    rng = random.Random(20)
    draws = [policy.delay(30, rng) for _ in range(20_000)]

    assert draws.count(3600) == 0
    assert math.fsum(draws) / len(draws) == pytest.approx(expected_mean, rel=0.02)


# Delays of one message


@pytest.mark.parametrize(
    "policy", [p for p in ALL if type(p) is not DecorrelatedJitter], ids=name_of
)
def test_independent_of_message(policy):
    """All policies except ``DecorrelatedJitter`` draw a delay regardless of the message's ID."""
    expected = [policy.delay(n, random.Random(7)) for n in (1, 2, 3)]

    assert [policy.delay_for("one", n, random.Random(7)) for n in (1, 2, 3)] == expected
    assert [policy.delay_for("two", n, random.Random(7)) for n in (1, 2, 3)] == expected


@given(message_id=st.text(), seed=seeds)
def test_decorrelated_delays(message_id, seed):
    """``DecorrelatedJitter`` computes each delay of a message from the message's last delay.

    It stores no delay. It draws all earlier delays again, with the message's ID as the seed.
    """
    order = random.Random(seed).sample(range(1, 21), k=20)
    asked = {n: DecorrelatedJitter().delay_for(message_id, n, random.Random(n)) for n in order}

    rng, delay = random.Random(message_id), 2.0
    for attempt in range(1, 21):
        delay = min(3600, rng.uniform(2, delay * 3))
        assert asked[attempt] == delay


def test_custom_policy():
    """A custom policy only has to define ``ceiling``."""

    class Linear(Policy):
        def ceiling(self, attempt):
            return 10.0 * attempt

    assert Linear().delay(3) == 30
    assert Linear().delay_for("any", 4) == 40


# Pickling and repr


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickling(protocol):
    """A policy is equal to itself after pickling."""
    assert pickle.loads(pickle.dumps(ALL, protocol)) == ALL


def test_repr():
    """The repr of a policy shows its values in seconds."""
    assert repr(FullJitter(cap=timedelta(hours=2))) == "FullJitter(base=2.0, cap=7200.0)"
    assert repr(Schedule([1, timedelta(minutes=1)])) == "Schedule(delays=(1.0, 60.0))"


# Invalid arguments

NOT_NUMBERS = [True, "2", None, [2], 2j]
NOT_FINITE = [math.nan, math.inf, -math.inf, 10**400]
LEGAL = "seconds or a timedelta, above 0, finite"


@pytest.mark.parametrize("argument", ["base", "cap"])
@pytest.mark.parametrize(
    ("value", "error"),
    [
        *((value, TypeError) for value in NOT_NUMBERS),
        *((value, ValueError) for value in [*NOT_FINITE, 0, -1, -0.0, timedelta(0)]),
    ],
    ids=lambda value: str(value)[:12],
)
def test_invalid_base_or_cap(argument, value, error):
    """A policy refuses a base or cap that is not a positive time."""
    for cls in GROWING:
        with pytest.raises(error, match=rf"^invalid {argument} .*: expected {LEGAL}$"):
            cls(**{argument: value})


@pytest.mark.parametrize("cls", GROWING, ids=name_of)
def test_cap_below_base(cls):
    """A policy refuses a cap below its base."""
    with pytest.raises(ValueError, match=r"^invalid cap 9: expected at least the base, 10$"):
        cls(base=10, cap=9)
    assert cls(base=10, cap=10).ceiling(1) == 10


@pytest.mark.parametrize(
    ("value", "error"),
    [
        *((value, TypeError) for value in NOT_NUMBERS),
        *((value, ValueError) for value in [*NOT_FINITE, -1, timedelta(seconds=-1)]),
    ],
    ids=lambda value: str(value)[:12],
)
def test_invalid_schedule_delay(value, error):
    """A schedule refuses a delay that is not a time."""
    legal = "seconds or a timedelta, from 0 up, finite"
    with pytest.raises(error, match=rf"^invalid delays\[1\] .*: expected {legal}$"):
        Schedule([1, value])


def test_empty_schedule():
    """A schedule needs a list of at least one delay."""
    with pytest.raises(ValueError, match=r"^invalid delays: expected at least one$"):
        Schedule([])
    with pytest.raises(TypeError, match=r"^invalid delays 5: expected a list"):
        Schedule(5)
