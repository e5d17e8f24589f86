"""The rate of a recovery."""

from __future__ import annotations

from random import Random

import pytest

from celery_sqs_backoff.provider.admission import (
    CALM_SECONDS,
    DOUBLING_SECONDS,
    KEPT_AFTER_REFUSAL,
    LOWEST_RATE,
    REGAIN_SECONDS,
    SAVED_SECONDS,
    SETTLE_SECONDS,
    START_RATE,
    Admission,
)


def started() -> Admission:
    admission = Admission()
    admission.start(0.0)
    return admission


def play(
    admission: Admission, seconds: float, *, begin: float = 0.0, limit: float | None = None
) -> tuple[int, int]:
    """Recall as much as allowed, each call answered at once; return (calls, refusals)."""
    calls = refusals = 0
    tokens, step, now = limit or 0.0, 0.05, begin
    while now < begin + seconds:
        now += step
        tokens = min(limit or 0.0, tokens + step * (limit or 0.0))
        for _ in range(admission.admit(100, now)):
            calls += 1
            if limit is not None and tokens < 1:
                refusals += 1
                admission.refused(now, now)
            else:
                tokens -= 1
                admission.succeeded(now)
    return calls, refusals


def test_it_limits_nothing_until_it_starts() -> None:
    admission = Admission()
    assert admission.admit(10, 0.0) == 0, "nothing is brought forward outside a recovery"


def test_it_doubles_in_the_given_time_while_all_succeed() -> None:
    admission = started()
    play(admission, 5 * DOUBLING_SECONDS)
    assert 2**3 < admission.rate / START_RATE < 2**6


def test_a_refusal_cuts_the_rate() -> None:
    admission = started()
    play(admission, 5 * DOUBLING_SECONDS)
    rate = admission.rate
    admission.refused(5.0, 5.2)
    assert admission.rate == pytest.approx(KEPT_AFTER_REFUSAL**2 * rate), "doubling went too far"
    admission.refused(6.0, 6.2)
    assert admission.rate == pytest.approx(KEPT_AFTER_REFUSAL**3 * rate)


def test_refusals_of_the_moment_after_a_cut_do_not_cut_again() -> None:
    """They began before anybody knew; or the provider refuses the rest of its second."""
    admission = started()
    play(admission, 5 * DOUBLING_SECONDS)
    admission.refused(4.8, 5.2)
    rate = admission.rate
    for began in (5.1, 5.2 + SETTLE_SECONDS):
        admission.refused(began, 6.0)
        assert admission.rate == rate
    admission.refused(5.21 + SETTLE_SECONDS, 6.0)
    assert admission.rate < rate


def test_it_is_back_at_the_refused_rate_within_the_given_time_also_if_few_calls_succeed() -> None:
    admission = started()
    play(admission, 5 * DOUBLING_SECONDS)
    admission.refused(5.0, 5.0)
    refused_rate = admission.rate / KEPT_AFTER_REFUSAL
    for i in range(40):
        now = 4.0 + REGAIN_SECONDS + i / 40
        admission.admit(100, now)
        admission.succeeded(now)
    assert admission.rate > 0.95 * refused_rate


def test_refusals_of_calls_from_before_the_rate_do_not_cut_it() -> None:
    """A worker that was too fast is slowed. Its calls under way would end the doubling at once.

    So would those that begin in the same second, which the provider refuses at any rate.
    """
    admission = Admission()
    admission.start(100.0)
    for began in (99.9, 99.9, 100.1, 100.7):
        admission.refused(began, now=began + 0.2)
    assert admission.rate == START_RATE
    play(admission, 4 * DOUBLING_SECONDS, begin=101.0)
    fast = admission.rate
    assert fast > 8 * START_RATE
    admission.refused(began=103.0, now=103.0)
    assert admission.rate < fast


def test_it_never_falls_below_the_lowest_rate() -> None:
    admission = started()
    for i in range(100):
        admission.refused(float(i), i + 0.5)
    assert admission.rate == LOWEST_RATE


@pytest.mark.parametrize("call_seconds", [0.5, 1.0, 3.0])
def test_a_low_rate_grows_however_long_a_call_takes(call_seconds: float) -> None:
    """At one call in five seconds a token is there again when a call of a second ends."""
    admission = started()
    for i in range(100):
        admission.refused(float(i), i + 0.5)
    assert admission.rate == LOWEST_RATE
    under_way: list[float] = []
    now = 100.0
    while now < 220.0:
        now += 0.05
        under_way += [now + call_seconds] * admission.admit(100, now)
        while under_way and under_way[0] <= now:
            under_way.pop(0)
            admission.succeeded(now)
    assert admission.rate > 2


def test_a_rate_that_nobody_uses_does_not_grow() -> None:
    admission = started()
    for i in range(1, 100):
        admission.succeeded(i * 10.0)
    assert admission.rate <= 2 * START_RATE


def test_a_rate_that_was_idle_for_long_is_tried_carefully() -> None:
    """CUBIC's curve alone would put it at thousands of calls a second."""
    admission = started()
    play(admission, 5 * DOUBLING_SECONDS)
    admission.refused(5.0, 5.0)
    rate = admission.rate
    admission.admit(100, 600.0)
    admission.succeeded(600.0)
    assert rate < admission.rate <= rate + START_RATE


def test_a_provider_that_goes_on_to_fail_a_few_calls_is_not_called_ever_more_seldom() -> None:
    admission, rng, now = started(), Random(1), 0.0
    while now < 600:
        now += 0.05
        for _ in range(admission.admit(100, now)):
            if rng.random() < 0.05:
                admission.refused(now, now)
            else:
                admission.succeeded(now)
    assert admission.rate > 5


def test_one_worker_uses_what_the_provider_takes_and_is_seldom_turned_away() -> None:
    calls, refusals = play(started(), 300.0, limit=20.0)
    assert calls - refusals > 0.85 * 300 * 20
    assert refusals < 0.06 * calls


def test_no_more_tokens_are_saved_than_a_moment_brings() -> None:
    admission = started()
    play(admission, 5 * DOUBLING_SECONDS)
    assert admission.admit(100, 1000.0) == int(SAVED_SECONDS * admission.rate)


def test_each_message_has_its_turn_behind_those_ahead() -> None:
    admission = started()
    assert admission.admit(1, 0.0) == 1
    assert admission.seconds_to_turn(0, 0.0) == pytest.approx(1 / START_RATE)
    assert admission.seconds_to_turn(9, 0.0) == pytest.approx(10 / START_RATE)


def test_it_is_calm_when_nobody_was_refused_and_nobody_had_to_wait() -> None:
    admission = started()
    assert not admission.is_calm(CALM_SECONDS - 1)
    assert admission.is_calm(CALM_SECONDS)
    admission.refused(59.0, CALM_SECONDS)
    assert not admission.is_calm(CALM_SECONDS + 1)
