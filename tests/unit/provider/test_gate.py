"""The state machine of a provider in one worker, in virtual time."""

from __future__ import annotations

import math
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_sqs_backoff import FullJitter, Policy, Provider, Schedule
from celery_sqs_backoff.provider.failures import REFUSED_SECONDS
from celery_sqs_backoff.provider.gate import (
    CALM_SECONDS,
    LATE_OUTAGE_SECONDS,
    LATE_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    LONGEST_RETRY_AFTER_SECONDS,
    MOST_CALLS,
    PAUSE_SHARE,
    PROBE_EXPIRES_SECONDS,
    GateState,
    ProviderGate,
)
from celery_sqs_backoff.provider.holds import (
    LEAST_GAIN_SECONDS,
    LONGEST_HOLD_SECONDS,
    LONGEST_SPREAD_SECONDS,
    SHORTEST_QUEUE_SECONDS,
    Look,
    Message,
)
from celery_sqs_backoff.provider.rate import RecoveryRate as Rate
from celery_sqs_backoff.retry.decision import Reply
from celery_sqs_backoff.sqs.delivery import Delivery
from celery_sqs_backoff.sqs.hidden import MARGIN_SECONDS, Hidden, Recall

ANSWERED, REFUSED, FAILED = Reply.ANSWERED, Reply.REFUSED, Reply.FAILED
FAILURES, PROBE_INTERVAL = 6, 5.0
HOUR = 3600.0


def runs(look: Look) -> bool:
    return look.hide_seconds is None and not look.waits


class Middle:
    """Draws the middle, so that intervals are their mean."""

    def uniform(self, a: float, b: float, /) -> float:
        return (a + b) / 2


class Worker:
    """A gate, and what it is asked and told."""

    def __init__(self, *, rng: Any = None, most_hidden: int | None = None, **options: Any) -> None:
        self.gate = ProviderGate(rng or Middle(), **options)
        if most_hidden is not None:
            self.gate.hidden = Hidden(most_hidden)

    def look(self, name: str, now: float, *, waiting: int = 0, **facts: Any) -> Look:
        return self.gate.arrived(Message(name, **facts), now, waiting=waiting)

    def run(self, name: str, reply: Reply | None, now: float, **facts: Any) -> None:
        assert runs(self.look(name, now))
        self.gate.ended(name, reply, now, **facts)

    def fail(self, number: int, now: float, reply: Reply = FAILED, **facts: Any) -> None:
        for i in range(number):
            self.gate.started(f"{reply} {now} {i}", now)
            self.gate.ended(f"{reply} {now} {i}", reply, now, **facts)

    def hide(self, name: str, now: float, seconds: float = HOUR, **facts: Any) -> None:
        hidden = self.gate.hidden
        hidden.add(name, now + seconds, Recall(hidden, **facts), now)

    def recalls(self, now: float, *, room: int = 100, waiting: int = 0) -> list[str]:
        found: list[str] = self.gate.recalls(now, room=room, waiting=waiting)
        for name in found:
            self.gate.hidden.discard(name)
        return found

    def recover(self, now: float) -> None:
        assert self.look("probe", now).is_probe
        self.gate.ended("probe", ANSWERED, now)


def down(now: float = 0.0, **options: Any) -> Worker:
    worker = Worker(**options)
    worker.fail(FAILURES, now)
    assert worker.gate.state is GateState.OPEN
    return worker


def recovering(now: float = 20.0, **options: Any) -> Worker:
    worker = down(**options)
    worker.recover(now)
    return worker


# It is told of a message

NOW = 1e9


class OneDelay(Policy):
    """A user's policy, which fails."""

    def ceiling(self, attempt: int) -> float:
        return [10.0][attempt]


@pytest.mark.parametrize(
    ("facts", "options", "expected"),
    [
        pytest.param({}, {}, {"longest": 540.0, "must_run": False}, id="the last run is before"),
        pytest.param({"first_received_at": NOW - 541}, {}, {"longest": -1.0}, id="no time left"),
        pytest.param(
            {"sent_at": NOW - 3600, "retention_seconds": 3600 + 299},
            {"retry_for": None},
            {"longest": 0.0},
            id="SQS is about to delete it",
        ),
        pytest.param(
            {"sent_at": NOW - 3600, "retention_seconds": 3600 + 320},
            {"retry_for": None},
            {"longest": math.inf},
            id="SQS keeps it",
        ),
        pytest.param(
            {"receive_count": 5, "max_receive_count": 5}, {}, {"must_run": True}, id="last receive"
        ),
        pytest.param(
            {"receive_count": 4, "max_receive_count": 5},
            {},
            {"must_run": False, "next_is_last": True, "is_spared": True},
            id="last but one",
        ),
        pytest.param(
            {"receive_count": 3, "max_receive_count": 8},
            {},
            {"next_is_last": False, "is_spared": False},
            id="receives to spare",
        ),
        pytest.param({}, {"backoff": Schedule([500])}, {"is_recallable": False}, id="schedule"),
        pytest.param(
            {},
            {"backoff": Schedule([500]), "provider": Provider("mail", recall=True)},
            {"is_recallable": True},
            id="schedule, recalled if asked",
        ),
        pytest.param(
            {},
            {"backoff": OneDelay()},
            {"policy_longest": FullJitter().ceiling(1000), "is_recallable": True},
            id="policy that fails",
        ),
    ],
)
def test_message(facts: dict[str, Any], options: dict[str, Any], expected: dict[str, Any]) -> None:
    """The gate reads from a delivery and its options how long it may hide the message."""
    times = {"received_at": NOW, "first_received_at": NOW, "sent_at": NOW}
    of: dict[str, Any] = {"provider": Provider("mail"), "backoff": FullJitter(), "retry_for": 600.0}
    delivery = Delivery(message_id="m", queue_url="q", **{**times, **facts})
    message = Message.of(delivery, rng=Middle(), now=NOW, **{**of, **options})
    assert {name: getattr(message, name) for name in expected} == expected


# It opens


def test_opens_after_failures_in_a_row() -> None:
    """The gate opens at the given number of failures in a row.

    A success in between restarts the count.
    """
    worker = Worker()
    worker.fail(FAILURES - 1, 0.0)
    worker.run("sent", ANSWERED, 1.0)
    worker.fail(FAILURES - 1, 100.0)
    assert worker.gate.state is GateState.CLOSED
    worker.fail(1, 100.1)
    assert worker.gate.state is GateState.OPEN
    assert not runs(worker.look("next", 100.2))


def test_failures_of_one_message() -> None:
    """Failures of one message never open the gate, even a thousand of them."""
    worker = Worker()
    for i in range(1000):
        worker.run("the same", FAILED, float(i))
    assert worker.gate.state is GateState.CLOSED


def test_inconclusive_runs() -> None:
    """Runs that show nothing about the provider do not count.

    They neither add a failure nor end the row of failures.
    """
    worker = Worker()
    for i in range(1000):
        worker.run(f"m{i}", None, float(i))
    worker.fail(FAILURES - 1, 1000.0)
    worker.run("shows nothing", None, 1000.0)
    worker.fail(1, 1000.1)
    assert worker.gate.state is GateState.OPEN


def test_failures_beside_successes() -> None:
    """A provider that fails shortly after a success is slowed down and not shut.

    The gate opens when failures go on and nothing has succeeded since.
    """
    worker = Worker()
    worker.run("sent", ANSWERED, 96.0)
    worker.fail(FAILURES, 100.0)
    assert worker.gate.state is GateState.RECOVERING
    assert runs(worker.look("next", 102.0))
    assert worker.look("after it", 102.0).waits
    worker.fail(FAILURES, 100.0 + 2 * PROBE_INTERVAL)
    assert worker.gate.state is GateState.OPEN, "nothing has succeeded since"


def test_refusals_at_the_start() -> None:
    """A provider that refuses every call is slowed down first, and shut if it goes on.

    A worker that has just started, beside others, calls it too fast.
    """
    worker = Worker()
    worker.fail(FAILURES, 100.0, REFUSED, retry_after=60.0)
    assert worker.gate.state is GateState.RECOVERING
    worker.fail(FAILURES, 99.0 + REFUSED_SECONDS, REFUSED, retry_after=60.0)
    assert worker.gate.state is GateState.RECOVERING
    worker.fail(FAILURES, 100.0 + REFUSED_SECONDS, REFUSED, retry_after=600.0)
    assert worker.gate.state is GateState.OPEN
    assert worker.gate.next_probe_at >= 700.0


def test_brown_out() -> None:
    """The gate never opens while the provider fails one call in five."""
    for seed in range(20):
        worker, rng, now = Worker(), Random(seed), 0.0
        for i in range(5000):
            now += 0.1
            if runs(worker.look(f"m{i}", now)):
                worker.gate.ended(f"m{i}", FAILED if rng.random() < 0.2 else ANSWERED, now)
            assert worker.gate.state is not GateState.OPEN


# It probes


def test_one_probe_at_a_time() -> None:
    """Only one message probes at a time, and the gate hides the others."""
    worker = down()
    assert worker.look("early", 4.9).hide_seconds
    assert worker.look("probe", 5.0).is_probe
    assert worker.look("other", 5.0).hide_seconds
    worker.gate.ended("begun before", None, 5.5)
    assert worker.look("other", 5.6).hide_seconds
    worker.gate.ended("probe", FAILED, 6.0)
    assert worker.look("other", 6.1).hide_seconds


def test_pause_between_probes() -> None:
    """The pause between probes is a sixth of the outage, within its bounds."""
    worker, probes = down(), []
    for i in range(30):
        now = worker.gate.next_probe_at
        worker.run(f"m{i}", FAILED, now)
        probes.append(now)
    assert probes[:4] == [5, 10, 15, 20]
    for began, after in pairwise(probes):
        mean = min(LONGEST_PAUSE_SECONDS, max(PROBE_INTERVAL, PAUSE_SHARE * began))
        assert after - began == pytest.approx(mean)
    assert probes[-1] - probes[-2] == LONGEST_PAUSE_SECONDS


def test_probe_from_another_worker() -> None:
    """A message that another worker has brought forward may probe before the next planned probe.

    So the news that the provider is back travels with the messages.
    """
    worker = down()
    now = 0.0
    while now < 600.0:
        now = worker.gate.next_probe_at
        worker.run("probe", FAILED, now)
    assert worker.gate.next_probe_at > now + 50
    assert worker.look("new", now + 10).hide_seconds
    assert worker.look("brought forward", now + 10, receives=3).is_probe
    assert worker.look("another", now + 10, receives=3).hide_seconds


def test_only_returned_message_probes_early() -> None:
    """A message that is received again causes no early probe with another message.

    Else one probe would cause the next one in each worker.
    """
    worker = down()
    while worker.gate.next_probe_at < 600.0:
        now = worker.gate.next_probe_at
        worker.run("probe", FAILED, now)
    worker.hide("hidden", now)
    assert worker.look("brought forward", now + 1.0, receives=2).hide_seconds
    assert worker.look("new", now + 10.0).hide_seconds
    assert worker.recalls(now + 10.0) == []
    assert worker.look("brought forward", now + 10.0, receives=3).is_probe


def test_early_probe_in_long_outage() -> None:
    """In a long outage, one message that is received again does not cause an early probe.

    Its hold may have ended. If a tenth of the messages is received again between two probes, other
    workers bring them forward.
    """
    worker = down()
    for i in range(100):
        worker.hide(f"m{i}", 1.0)
    now = LATE_OUTAGE_SECONDS
    worker.run("probe", FAILED, now)
    for i in range(9):
        assert worker.look(f"m{i}", now + 6.0, receives=2).hide_seconds
    assert worker.look("new", now + 7.0).hide_seconds
    assert worker.look("m9", now + 8.0, receives=2).is_probe


def test_early_probe_without_recall() -> None:
    """In a long outage, messages that the worker cannot bring forward cause few early probes."""
    worker, now = down(), LATE_OUTAGE_SECONDS
    worker.run("probe", FAILED, now)
    assert worker.look("m", now + 6.0, receives=2, is_recallable=False).hide_seconds
    assert worker.look("m", now + LATE_PAUSE_SECONDS, receives=2, is_recallable=False).is_probe


def test_inconclusive_probe() -> None:
    """A probe that proves nothing is repeated after the usual interval."""
    worker = down()
    worker.run("probe", None, 5.0)
    assert (worker.gate.state, worker.gate.next_probe_at) == (GateState.OPEN, 10.0)


def test_unreported_probe() -> None:
    """A probe whose end is never reported is replaced once it expires."""
    worker = down()
    assert worker.look("lost", 5.0).is_probe
    late = 5.0 + PROBE_EXPIRES_SECONDS
    assert not worker.gate.needs_probe(late - 0.1)
    assert worker.look("second", late).is_probe


def test_begins_while_open() -> None:
    """Only the probe begins while the gate is open.

    Other messages begin once the provider has answered it.
    """
    worker = down()
    assert worker.look("probe", 5.0).is_probe
    assert [worker.gate.begins(name, 6.0) for name in ("probe", "other")] == [True, False]
    worker.gate.ended("probe", ANSWERED, 7.0)
    assert worker.gate.begins("other", 7.0)


def test_probe_respects_retry_after() -> None:
    """The next probe respects Retry-After, but waits no longer than the gate's own limit."""
    worker = down()
    worker.run("probe", REFUSED, 5.0, retry_after=120.0)
    assert worker.gate.next_probe_at == 125.0
    worker.run("probe", REFUSED, 125.0, retry_after=1e9)
    assert worker.gate.next_probe_at == 125.0 + LONGEST_RETRY_AFTER_SECONDS


def test_early_probe_respects_retry_after() -> None:
    """A message that is received again does not probe before the provider's Retry-After is over."""
    worker = down()
    worker.run("probe", FAILED, 10.0, retry_after=600.0)
    assert worker.look("brought forward", 20.0, receives=2).hide_seconds
    assert worker.look("brought forward", 611.0, receives=2).is_probe


def test_success_makes_probe_due() -> None:
    """A success of a call that began before the outage makes the probe due at once."""
    worker = down()
    worker.gate.ended("begun before", ANSWERED, 1.0)
    assert worker.gate.state is GateState.OPEN
    assert worker.look("probe", 1.0).is_probe


def test_recall_to_probe() -> None:
    """The gate brings one hidden message forward to probe with when none comes due.

    It takes the one that was received least. It takes one whose next receive is its last only if no
    other is left.
    """
    worker = down()
    worker.hide("often", 1.0, receives=7)
    worker.hide("last", 1.0, next_is_last=True)
    worker.hide("once", 1.0, receives=1)
    worker.hide("early", 1.0, not_before=900.0)
    worker.hide("spared", 1.0, probe_from=900.0)
    assert worker.recalls(4.9) == []
    taken = []
    for _ in range(4):
        now = worker.gate.next_probe_at
        taken += worker.recalls(now)
        assert worker.recalls(now) == [], "one at a time"
    assert taken == ["once", "often", "last"]


def test_recalled_message_probes() -> None:
    """A message that this worker has brought forward to probe with probes here too."""
    worker = down()
    worker.hide("m", 1.0)
    now = worker.gate.next_probe_at
    assert worker.recalls(now) == ["m"]
    assert worker.look("m", now + 0.1, receives=2).is_probe


def calls_during(outage: float, gap: float, seed: int) -> int:
    """Calls during an outage, if a message comes due every ``gap`` seconds and fails at once."""
    worker, now, calls, number = Worker(rng=Random(seed)), 0.0, 0, 0
    while now < outage:
        number += 1
        if runs(worker.look(f"m{number}", now)):
            calls += 1
            worker.gate.ended(f"m{number}", FAILED, now)
        now += gap
    return calls


@given(outage=st.floats(1.0, 5e4), gap=st.floats(0.1, 60.0), seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_calls_during_outage(outage: float, gap: float, seed: int) -> None:
    """Threshold and probes bound the number of calls during an outage."""
    outage = min(outage, 5_000 * gap)
    shortest = PROBE_INTERVAL * 0.75
    steps = math.log(LONGEST_PAUSE_SECONDS / PROBE_INTERVAL, 1 + PAUSE_SHARE * 0.75)
    probes = PROBE_INTERVAL / PAUSE_SHARE / shortest + steps + 1
    probes += outage / (LONGEST_PAUSE_SECONDS * 0.75) + 1
    assert calls_during(outage, gap, seed) <= FAILURES + probes


# It hides


def test_first_hold() -> None:
    """The first hold is as long as the policy's longest delay, less up to a quarter of it."""
    hold = down(rng=Random(1)).look("a", 1.0, policy_longest=100.0).hide_seconds
    assert hold is not None
    assert 75 <= hold <= 100


@pytest.mark.parametrize("receives", [1, 5, 20])
@pytest.mark.parametrize(("outage", "longest"), [(300.0, 600.0), (7200.0, LONGEST_HOLD_SECONDS)])
def test_holds_grow_with_outage(outage: float, longest: float, receives: int) -> None:
    """Holds grow with the outage up to half an hour, whatever the number of receives.

    A message that had five receives before the outage was hidden for 87 minutes.
    """
    worker = down(rng=Random(1))
    worker.gate.next_probe_at = math.inf
    worker.gate._probed_at = outage
    hold = worker.look("a", outage, receives=receives, policy_longest=60.0).hide_seconds
    assert hold is not None
    assert 0.74 * longest <= hold <= longest
    assert worker.look("b", outage, longest=50.0).hide_seconds <= 50  # type: ignore[operator]


def test_must_not_be_hidden() -> None:
    """A message that must not be hidden runs, as the probe only if one is due."""
    worker = down()
    assert runs(worker.look("a", 1.0, longest=0.0))
    assert runs(worker.look("b", 1.0, must_run=True))
    assert not worker.look("b", 1.0, must_run=True).is_probe
    assert worker.look("b", 10.0, must_run=True).is_probe, "one is due"


@pytest.mark.parametrize("options", [{"most_hidden": 0}, {}], ids=["no room", "exact delays"])
def test_holds_without_recall(
    options: dict[str, Any],
) -> None:
    """A message that cannot be brought forward waits for the next probe and then its own delay."""
    worker = down(**options)
    look = worker.look("a", 1.0, own_delay=7.0, is_recallable=bool(options))
    assert look.hide_seconds == 4.0 + 7.0


def test_hold_after_failure() -> None:
    """A failed message is hidden for no less than the gate would hide it.

    A message that cannot be brought forward keeps its own delay.
    """
    worker = Worker()
    message = Message("a", policy_longest=100.0)

    def delay(seconds: float, **facts: Any) -> float:
        kept = Message("a", policy_longest=100.0, **facts)
        return worker.gate.failed(kept, FAILED, seconds, 0.0, floor=0.0).hide_seconds or 0.0

    assert delay(3.0) == 3.0
    worker = down()
    assert delay(3.0) == pytest.approx(87.5)
    assert delay(300.0) == 300.0
    assert delay(3.0, is_recallable=False) == 3.0
    assert message.is_recallable


# It recovers


@pytest.mark.parametrize(("is_spared", "seconds"), [(False, 2.0), (True, 30.0)])
def test_refused_with_few_receives_left(is_spared: bool, seconds: float) -> None:
    """A refused message with few receives left comes back later than others.

    Each early return costs a receive, and the provider may refuse it again.
    """
    gate, message = recovering().gate, Message("m", receives=4, is_spared=is_spared)
    assert gate.failed(message, REFUSED, 300.0, 20.0, floor=0.0).hide_seconds == seconds


def test_one_rate_for_all() -> None:
    """All messages of a recovering provider pass through one rate.

    A few of them wait in the worker, and the gate hides the rest.
    """
    worker = recovering()
    assert runs(worker.look("first", 20.0)), "there is a token"
    assert worker.look("second", 20.0).waits
    looks = [worker.look(f"m{i}", 20.0, waiting=i) for i in range(1, 5)]
    assert [look.waits for look in looks] == [True, False, False, False], "at one call a second"
    assert all(look.hide_seconds for look in looks[1:])
    assert worker.look("must stay", 20.0, waiting=9, must_run=True).waits
    assert worker.gate.turns(4, 20.5) == 0
    assert worker.gate.turns(4, 21.1) == 1


def test_line_when_it_opens() -> None:
    """When the gate opens, it looks again at all messages that wait in line."""
    worker = recovering()
    worker.fail(FAILURES, 30.0)
    assert worker.gate.turns(3, 30.0) == 3
    assert not runs(worker.look("one of them", 30.0))


def test_recall_order() -> None:
    """A recovery brings all hidden messages forward, beginning with those due last."""
    worker = down()
    names = [f"m{i}" for i in range(50)]
    for i, name in enumerate(names):
        worker.hide(name, 1.0, 1000.0 + i)
    worker.recover(20.0)
    taken = []
    now = 20.0
    while now < 60.0:
        taken += worker.recalls(now)
        now += 0.25
    assert taken == names[::-1]


def test_recall_needs_room() -> None:
    """The gate brings nothing forward behind a line, or when no process has room."""
    worker = down()
    for i in range(50):
        worker.hide(f"m{i}", 1.0)
    worker.recover(20.0)
    assert worker.recalls(22.0, waiting=5) == []
    assert worker.recalls(24.0, room=0) == []
    assert len(worker.recalls(26.0, room=2)) == 2


def test_recall_window() -> None:
    """The gate brings no message forward early, or when its hold may have ended."""
    worker = down()
    worker.hide("returns by itself", 1.0, 24.0 + MARGIN_SECONDS)
    worker.hide("allowed later", 1.0, not_before=100.0)
    worker.recover(20.0)
    taken = [name for now in range(25, 100) for name in worker.recalls(float(now))]
    assert taken == []
    assert worker.recalls(100.0) == ["allowed later"]


@pytest.mark.parametrize(("receives", "seconds"), [(1, 0.5), (8, 4.0), (20, 10.0), (90, 30.0)])
def test_failure_in_recovery(receives: int, seconds: float) -> None:
    """A message that fails in a recovery comes back soon, but later after each receive.

    The gate does not bring it forward before that.
    """
    worker = recovering()
    message = Message("a", receives=receives)
    look = worker.gate.failed(message, FAILED, 300.0, 21.0, floor=0.0)
    assert look.hide_seconds == seconds
    assert look.recall is not None
    assert look.recall.not_before == 21.0 + seconds


def test_turn_after_failures() -> None:
    """A message that has failed often, and then waits for its turn, is brought forward.

    The wait may be long, because it grows with the number of hidden messages.
    """
    worker = recovering()
    for now in (30.0, 40.0, 50.0):
        worker.gate.started("a", now)
        worker.gate.ended("a", FAILED, now)
    look = worker.look("a", 60.0, waiting=100, receives=4)
    assert look.hide_seconds == SHORTEST_QUEUE_SECONDS
    assert look.recall is not None
    assert look.recall.not_before == 0.0


def test_delays_not_cut() -> None:
    """The gate cuts no delay below its floor.

    It also keeps delays that have another reason than the provider, and those of a schedule.
    """
    worker = recovering()

    def delay(message: Message, reply: Reply | None, floor: float = 0.0) -> float | None:
        return worker.gate.failed(message, reply, 300.0, 21.0, floor=floor).hide_seconds

    assert delay(Message("a"), REFUSED, floor=60.0) == 60.0
    assert delay(Message("a"), None) == 300.0
    assert delay(Message("a", is_recallable=False), FAILED) == 300.0


def test_rate_after_refusals() -> None:
    """The gate searches the rate anew after an outage of refusals.

    A 503 with a Retry-After refuses: half a minute of them cuts the rate to the lowest. From there
    it would take ten minutes to the provider's own rate.
    """
    worker, now = recovering(), 20.0
    while now < 50.0:
        now += 1.0
        worker.fail(worker.gate.turns(3, now), now, REFUSED)
    assert worker.gate.state is GateState.RECOVERING
    assert worker.gate.rate.rate < Rate.START
    while now < 65.0:
        now += 0.1
        for i in range(worker.gate.turns(10, now)):
            worker.gate.ended(f"{now} {i}", ANSWERED, now)
    assert worker.gate.rate.rate > 10.0


def test_refusals_within_a_second() -> None:
    """Refusals for the rest of a second do not make the gate search the rate anew."""
    worker, now = recovering(), 20.0
    for _ in range(10):
        worker.fail(20, now, REFUSED)
        worker.gate.ended("m", ANSWERED, now + 0.9)
        now += 1.0
    assert worker.gate.rate.rate <= Rate.START


def test_reopens_without_answers() -> None:
    """The gate opens again if a recovering provider answers nothing."""
    worker = recovering(100.0)
    worker.fail(20, 109.9)
    assert worker.gate.state is GateState.RECOVERING
    worker.fail(1, 110.0)
    assert worker.gate.state is GateState.OPEN


def test_slot_needs_no_token_first() -> None:
    """In a slow recovery, a message waits for its agreed slot here if no other one waits.

    If it were hidden, no call would be made, and the rate would never grow.
    """
    worker = recovering()
    worker.gate.rate.rate = Rate.LOWEST
    assert worker.gate.arrived(Message("m"), 21.0, waiting=0, needs_slot=True).waits
    worker.gate.turns(1, 21.0)
    assert worker.gate.arrived(Message("n"), 40.0, waiting=0, needs_slot=True).waits


def test_closes_with_an_agreed_rate() -> None:
    """A recovery ends although each message waits for its slot."""
    worker, now = recovering(), 20.0
    while now < 20.0 + CALM_SECONDS:
        now += 5.0
        assert worker.gate.arrived(Message(f"{now}"), now, waiting=0, needs_slot=True).waits
        assert worker.gate.turns(1, now) == 1
        worker.gate.ended(f"{now}", ANSWERED, now)
        worker.recalls(now)
    worker.recalls(now + 1.0)
    assert worker.gate.state is GateState.CLOSED


def test_closes_after_calm() -> None:
    """The gate closes when no message has waited for a minute."""
    worker = recovering()
    worker.recalls(20.0 + CALM_SECONDS)
    assert worker.gate.state is GateState.RECOVERING
    worker.recalls(20.1 + CALM_SECONDS)
    assert worker.gate.state is GateState.CLOSED
    assert worker.gate.seconds_to_look is None


@pytest.mark.parametrize(
    ("until", "state"), [(4000.0, GateState.RECOVERING), (300.0, GateState.CLOSED)], ids=str
)
def test_recovery_waits_for_retry_after(until: float, state: GateState) -> None:
    """The recovery goes on while hidden messages wait for their Retry-After.

    Otherwise, they would come back by themselves, up to hours after the provider.
    """
    worker = down()
    worker.hide("m", 1.0, until - 1.0, not_before=300.0)
    worker.recover(10.0)
    for now in range(11, 300):
        assert worker.recalls(float(now)) == []
    assert worker.gate.state is state
    assert worker.recalls(301.0) == (["m"] if state is GateState.RECOVERING else [])


# The rate


def play(
    rate: Rate, seconds: float, *, limit: float, call_seconds: float, brown: float = 0.0
) -> tuple[float, float]:
    """Call as fast as allowed; return the share of the limit used, and of the calls refused."""
    rng, now, under_way = Random(1), 0.0, list[tuple[float, float, Reply]]()
    second, taken = -1, 0
    calls = {ANSWERED: 0, REFUSED: 0, FAILED: 0}
    while now < seconds:
        now += 0.02
        while under_way and under_way[0][0] <= now:
            _, began, reply = under_way.pop(0)
            rate.ended(reply, began, now)
            calls[reply] += 1
        for _ in range(rate.take(100, now)):
            if int(now) != second:
                second, taken = int(now), 0
            taken += 1
            reply = REFUSED if taken > limit else FAILED if rng.random() < brown else ANSWERED
            under_way.append((now + call_seconds, now, reply))
    total = sum(calls.values())
    return (total - calls[REFUSED]) / (seconds * limit), calls[REFUSED] / total


@pytest.mark.parametrize("call_seconds", [0.05, 0.5, 1.0, 3.0])
def test_rate_finds_limit(
    call_seconds: float,
) -> None:
    """The rate comes close to the provider's limit, however long a call takes."""
    used, refused = play(Rate(), 300.0, limit=20.0, call_seconds=call_seconds)
    assert used > 0.85
    assert refused < 0.15


def test_rate_in_brown_out() -> None:
    """The rate stays high for a provider that fails one call in five."""
    used, _ = play(Rate(), 300.0, limit=20.0, call_seconds=0.2, brown=0.2)
    assert used > 0.8


def test_rate_cut_by_failures() -> None:
    """Failures cut the rate while more than half of the calls fail."""
    rate = Rate()
    for i in range(50):
        rate.take(1, i * 1.0)
        rate.ended(FAILED, i * 1.0, i * 1.0)
    assert rate.rate < 0.5 * Rate.START


def test_rate_cut_once() -> None:
    """Refusals of calls that began at about the same time cut the rate once.

    These calls began before the first refusal was known, or the provider refuses the rest of its
    second.
    """
    rate = Rate()
    play(rate, 20.0, limit=20.0, call_seconds=0.05)
    rate.ended(REFUSED, 21.0, 21.2)
    low = rate.rate
    for began in (21.1, 21.2 + Rate.SETTLE_SECONDS):
        rate.ended(REFUSED, began, 22.0)
    assert rate.rate == low
    rate.ended(REFUSED, 21.21 + Rate.SETTLE_SECONDS, 22.0)
    assert rate.rate < low


def test_unused_rate() -> None:
    """A rate that is not used does not grow."""
    rate = Rate()
    play(rate, 20.0, limit=20.0, call_seconds=0.05)
    high = rate.rate
    for i in range(100):
        rate.ended(ANSWERED, 30.0 + i, 30.0 + i)
    assert Rate.START <= rate.rate < high


# It stops


def test_hand_over() -> None:
    """A stopping worker lets its 50 hidden messages come back within five seconds."""
    worker = down(rng=Random(1))
    for i in range(50):
        worker.hide(f"m{i}", 1.0)
    found = worker.gate.hand_over(2.0)
    assert len(found) == 50
    assert max(seconds for _, seconds in found) <= 5


def test_hand_over_is_spread() -> None:
    """A stopping worker spreads 9,000 messages evenly over three minutes."""
    worker = down(rng=Random(1))
    for i in range(9000):
        worker.hide(f"m{i}", 1.0)
    seconds = [seconds for _, seconds in worker.gate.hand_over(2.0)]
    assert len(seconds) == 9000
    assert max(seconds) == LONGEST_SPREAD_SECONDS
    assert max(map(seconds.count, set(seconds))) < 120, "about 50 in each second"


def test_hand_over_gains() -> None:
    """A stopping worker hands over only messages that would otherwise come back much later.

    It leaves out those whose next receive is their last, and respects Retry-After.
    """
    worker = down()
    worker.hide("b", 0.0, 200.0)
    worker.hide("a", 0.0, 300.0)
    worker.hide("returns soon", 0.0, 20.0)
    worker.hide("its next receive is its last", 0.0, next_is_last=True)
    worker.hide("later", 0.0, 200.0, not_before=201.0 - LEAST_GAIN_SECONDS)
    worker.hide("allowed later", 1.0, not_before=600.5)
    assert [name for name, _ in worker.gate.hand_over(1.0)] == ["allowed later", "a", "b"]
    assert dict(worker.gate.hand_over(1.0))["allowed later"] == 600


def test_hand_over_while_closed() -> None:
    """A worker that stops while the provider is well leaves messages their own delays."""
    worker = Worker()
    worker.hide("m", 0.0)
    assert worker.gate.hand_over(1.0) == []


# What holds in every history


def test_state_is_bounded() -> None:
    """The gate keeps a bounded number of hidden messages and of calls that have begun."""
    worker = down(most_hidden=10)
    for i in range(20_000):
        worker.look(f"m{i}", 1.0)
        worker.hide(f"m{i}", 1.0, 100.0 + i)
    assert len(worker.gate.hidden) == 10
    worker.recover(20.0)
    for i in range(20_000):
        worker.gate.started(f"n{i}", 20.0)
    assert len(worker.gate._began) <= MOST_CALLS


@given(seed=st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_any_history(seed: int) -> None:
    """Every history of a gate keeps its promises.

    Only a probe ends an outage, a probe is always planned, and no message is brought forward when
    its hold may have ended.
    """
    rng = Random(seed)
    worker, now = Worker(rng=rng, most_hidden=10), 0.0
    gate = worker.gate
    running: dict[str, bool] = {}
    held: dict[str, tuple[float, float]] = {}
    for number in range(300):
        now += rng.choice([0.0, 0.1, 3.0, 30.0, 700.0])
        step = rng.random()
        if running and step < 0.4:
            name = rng.choice(list(running))
            is_probe, was = running.pop(name), gate.state
            reply = rng.choice([None, ANSWERED, REFUSED, *[FAILED] * 4])
            gate.ended(name, reply, now, retry_after=rng.choice([None, 100.0]))
            if was is GateState.OPEN and gate.state is not GateState.OPEN:
                assert is_probe
                assert reply is ANSWERED
        elif step < 0.6:
            for name, (until, _) in list(held.items()):
                if now >= until - MARGIN_SECONDS:
                    del held[name]
                    gate.hidden.discard(name)
            for name in worker.recalls(now, room=rng.randrange(5), waiting=rng.randrange(3)):
                until, not_before = held.pop(name)
                assert not_before <= now < until - MARGIN_SECONDS
        else:
            name = rng.choice([f"m{number}", *held])
            look = worker.look(name, now, receives=rng.randrange(1, 4))
            held.pop(name, None)
            gate.hidden.discard(name)
            if runs(look):
                running[name] = look.is_probe
            elif look.hide_seconds is not None:
                until = now + rng.choice([1.0, 60.0, look.hide_seconds])
                not_before = now + rng.choice([0.0, 0.0, 90.0])
                worker.hide(name, now, until - now, not_before=not_before)
                held[name] = until, not_before
        assert len(gate.hidden) <= 10
        if gate.state is GateState.OPEN:
            later = now + PROBE_EXPIRES_SECONDS + LONGEST_RETRY_AFTER_SECONDS + 75.0
            assert gate.needs_probe(later)
