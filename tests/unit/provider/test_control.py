"""Gate, recall and recovery together, as a worker uses them."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from celery_sqs_backoff import FullJitter, Outcome, Schedule
from celery_sqs_backoff.provider.admission import CALM_SECONDS
from celery_sqs_backoff.provider.control import (
    MANY_LOOKS,
    PROBE_GRACE_SECONDS,
    SOON_SECONDS,
    SOON_TIMES,
    Control,
    Event,
    Look,
)
from celery_sqs_backoff.provider.health import State, Thresholds
from celery_sqs_backoff.provider.recall import Hidden

DAY = 86_400.0


class Worker:
    """A control, and the messages that it was told of."""

    def __init__(self, *, limit: int = 100, seed: int = 1) -> None:
        self.events: list[tuple[Event, int]] = []
        self.control = Control(
            Thresholds(),
            Random(seed),
            limit=limit,
            on_event=lambda n: self.events.append((n.event, n.messages)),
        )

    def look(self, message_id: str, now: float, **options: Any) -> Look:
        defaults: dict[str, Any] = {
            **{"policy": FullJitter(), "looks": 1, "longest": DAY},
            **{"ahead": 0, "longest_wait": 2.0},
        }
        return self.control.look(message_id, now, **defaults | options)

    def hide(self, message_id: str, now: float, seconds: float, not_before: float = 0) -> bool:
        hidden = Hidden(message_id, "h", "q", now + seconds, not_before)
        return self.control.hidden(hidden, now)

    def run(self, message_id: str, outcome: Outcome | None, now: float, **kw: Any) -> None:
        assert self.look(message_id, now).runs
        self.control.ended(message_id, outcome, now, **kw)

    def outage(self, now: float = 0.0) -> None:
        for i in range(Thresholds().failures):
            self.run(f"first {i}", Outcome.RETRYABLE, now)
        assert self.control.health.state is State.OPEN

    def recover(self, now: float) -> None:
        look = self.look("probe", now)
        assert look.is_probe
        self.control.ended("probe", None, now)


def test_nothing_runs_while_the_gate_is_open_and_what_is_hidden_is_remembered() -> None:
    worker = Worker()
    worker.outage()
    look = worker.look("a", 1.0)
    assert not look.runs
    assert look.hide_seconds is not None
    assert worker.hide("a", 1.0, look.hide_seconds)
    assert len(worker.control.memory) == 1


def test_a_success_brings_them_back_at_a_growing_rate() -> None:
    worker = Worker()
    worker.outage()
    for i in range(100):
        worker.hide(f"m{i}", 1.0, 1000.0)
    assert worker.control.recalls(2.0, room=100) == [], "not while the gate is open"
    worker.recover(20.0)
    first = worker.control.recalls(20.0, room=100)
    assert len(first) == 1
    seconds: list[int] = []
    for second in range(3):
        seconds.append(0)
        for quarter in range(1, 5):
            now = 20.0 + second + quarter / 4
            for hidden in worker.control.recalls(now, room=100):
                worker.run(hidden.message_id, None, now)
                seconds[-1] += 1
    assert seconds == sorted(seconds)
    assert seconds[-1] > 2 * seconds[0]


def test_a_worker_without_room_recalls_nothing() -> None:
    worker = Worker()
    worker.outage()
    worker.hide("a", 1.0, 1000.0)
    worker.recover(20.0)
    assert worker.control.recalls(20.0, room=0) == []
    assert len(worker.control.recalls(20.0, room=1)) == 1


def test_a_message_that_returns_by_itself_is_forgotten() -> None:
    worker = Worker()
    worker.outage()
    worker.hide("a", 1.0, 1000.0)
    worker.look("a", 2.0)
    assert len(worker.control.memory) == 0


def test_new_and_returning_messages_pass_through_the_same_rate() -> None:
    worker = Worker()
    worker.outage()
    worker.recover(20.0)
    assert worker.look("first", 20.0).runs, "there is a token"
    looks = [worker.look(f"new {i}", 20.0, ahead=i) for i in range(10)]
    assert [look.waits for look in looks] == [True] * 4 + [False] * 6, "at two calls a second"
    assert all(look.hide_seconds and look.hide_seconds >= 1 for look in looks[4:])
    often = worker.look("seen often", 20.0, looks=MANY_LOOKS, ahead=10)
    assert often.waits, "each look costs a receive"
    late = worker.look("late", 20.0, looks=MANY_LOOKS, ahead=10, longest=3.0)
    assert late.hide_seconds == 3.0, "its turn would come after its retry_for"


def test_those_that_wait_take_their_turns_at_the_rate_and_before_any_recall() -> None:
    worker = Worker()
    worker.outage()
    for i in range(50):
        worker.hide(f"m{i}", 1.0, 1000.0)
    worker.recover(20.0)
    assert worker.look("first", 20.0).runs
    assert worker.control.turns(3, 20.25) == 0
    assert worker.control.recalls(20.5, room=10, waiting=3) == []
    assert worker.control.turns(3, 20.5) == 1
    assert len(worker.control.recalls(21.0, room=10, waiting=0)) == 1


def test_what_is_brought_forward_takes_its_token_where_it_runs() -> None:
    """One worker may bring forward what others run: else the rate of a fleet is that of one."""
    worker = Worker()
    worker.outage()
    worker.hide("a", 1.0, 1000.0)
    worker.recover(20.0)
    assert len(worker.control.recalls(20.0, room=10)) == 1
    assert worker.look("of another worker", 20.0).runs
    assert worker.look("a", 20.0).waits


def test_those_that_wait_are_all_looked_at_again_when_the_gate_opens() -> None:
    worker = Worker()
    worker.outage()
    worker.recover(20.0)
    worker.control.told_open(21.0, 30.0)
    assert worker.control.turns(3, 21.0) == 3
    assert not worker.look("one of them", 21.0).runs


def test_the_first_hold_is_as_long_as_the_policys_longest_delay() -> None:
    worker = Worker()
    worker.outage()
    hold = worker.look("a", 1.0, policy=FullJitter(cap=100)).hide_seconds
    assert hold is not None
    assert 75 <= hold <= 100


@pytest.mark.parametrize("looks", [1, 2, 5, 20])
@pytest.mark.parametrize(("outage", "longest"), [(300.0, 600.0), (7200.0, 1800.0)])
def test_holds_grow_with_the_outage_alone_up_to_half_an_hour(
    outage: float, longest: float, looks: int
) -> None:
    """A message that had five receives before the outage was hidden for 87 minutes."""
    worker = Worker()
    worker.outage()
    _probes(worker, outage - 1.0)
    hold = worker.look("a", outage, looks=looks, policy=FullJitter(cap=60)).hide_seconds
    assert hold is not None
    assert 0.74 * longest <= hold <= longest
    assert worker.look("b", outage, longest=50.0).hide_seconds <= 50  # type: ignore[operator]


def _probes(worker: Worker, now: float) -> bool:
    """Make a probe fail, so that none is due for a while."""
    worker.run("probe", Outcome.RETRYABLE, now)
    return False


@pytest.mark.parametrize("options", [{"recallable": False}, {"policy": Schedule([7])}], ids=str)
def test_without_recall_a_message_looks_again_after_the_probe_and_its_own_delay(
    options: dict[str, Any],
) -> None:
    worker = Worker(limit=0)
    worker.outage()
    probe_at = worker.control.health.next_probe_at
    hold = worker.look("a", 1.0, **options).hide_seconds
    assert hold is not None
    longest = 7 if "policy" in options else 2
    assert probe_at - 1.0 <= hold <= probe_at - 1.0 + longest


def test_without_recall_the_recovery_is_not_limited() -> None:
    worker = Worker(limit=0)
    worker.outage()
    worker.recover(20.0)
    assert all(worker.look(f"m{i}", 20.0).runs for i in range(100))


def test_a_failed_message_is_hidden_for_no_less_than_the_gate_would() -> None:
    worker = Worker()
    options = delay_options()
    assert worker.control.delay_after_failure("a", 3.0, 0.0, **options) == 3.0
    worker.outage()
    assert worker.control.delay_after_failure("a", 3.0, 0.0, **options) >= 75
    assert worker.control.delay_after_failure("a", 300.0, 0.0, **options) == 300.0
    assert worker.control.delay_after_failure("a", 3.0, 0.0, recallable=False, **options) == 3.0


def delay_options(floor: float = 0.0) -> dict[str, Any]:
    return {"policy": FullJitter(cap=100), "looks": 1, "longest": DAY, "floor": floor}


def test_a_message_that_is_refused_during_the_recovery_comes_back_soon_but_not_each_time() -> None:
    worker = Worker()
    worker.outage()
    worker.recover(20.0)
    delays = []
    for i in range(SOON_TIMES + 1):
        now = 30.0 * (i + 1)
        worker.run("a", Outcome.RETRYABLE, now)
        delay = worker.control.delay_after_failure("a", 300.0, now, **delay_options())
        delays.append(delay)
    assert delays == [SOON_SECONDS] * SOON_TIMES + [300.0]


def test_a_refused_message_comes_back_no_sooner_than_the_provider_allows() -> None:
    worker = Worker()
    worker.outage()
    worker.recover(20.0)
    worker.run("a", Outcome.RETRYABLE, 21.0)
    delay = worker.control.delay_after_failure("a", 300.0, 21.0, **delay_options(floor=60.0))
    assert delay == 60.0
    exact = worker.control.delay_after_failure(
        "a", 300.0, 21.0, recallable=False, **delay_options()
    )
    assert exact == 300.0


def test_without_messages_that_come_due_one_is_recalled_to_probe_with() -> None:
    worker = Worker()
    worker.outage()
    worker.hide("far", 1.0, 1000.0)
    worker.hide("near", 1.0, 500.0)
    due = worker.control.health.next_probe_at + PROBE_GRACE_SECONDS
    assert worker.control.recalls(due - 0.1, room=0) == []
    [recalled] = worker.control.recalls(due, room=0)
    assert recalled.message_id == "near"
    assert worker.control.recalls(due, room=0) == [], "one at a time"
    assert worker.look("near", due + 0.1).is_probe


def test_nothing_is_recalled_before_retry_after() -> None:
    worker = Worker()
    worker.outage()
    worker.hide("a", 1.0, 1000.0, not_before=100.0)
    worker.recover(90.0)
    assert worker.control.recalls(99.0, room=10) == []
    assert len(worker.control.recalls(100.0, room=10)) == 1


def test_a_second_outage_stops_the_recall() -> None:
    worker = Worker()
    worker.outage()
    for i in range(50):
        worker.hide(f"m{i}", 1.0, 1000.0)
    worker.recover(20.0)
    for i in range(Thresholds().failures + 1):
        worker.look(f"again {i}", 20.5 + i)
        worker.control.ended(f"again {i}", Outcome.RETRYABLE, 20.6 + i)
    assert worker.control.health.state is State.OPEN
    assert worker.control.recalls(28.0, room=10) == []


def test_refusals_while_the_provider_recovers_cut_the_rate_and_leave_the_gate_closed() -> None:
    worker = Worker()
    worker.outage()
    worker.recover(20.0)
    for i in range(8):
        worker.look(f"sent {i}", 20.0 + i)
        worker.control.ended(f"sent {i}", None, 20.1 + i)
    rate = worker.control.admission.rate
    for i in range(2 * Thresholds().failures):
        worker.look(f"refused {i}", 28.0)
        worker.control.ended(f"refused {i}", Outcome.RETRYABLE, 28.1)
    assert worker.control.health.state is State.CLOSED
    assert worker.control.admission.rate < rate


def test_the_recovery_ends_when_all_is_calm() -> None:
    worker = Worker()
    assert worker.control.is_quiet
    worker.outage()
    worker.recover(20.0)
    assert not worker.control.is_quiet
    worker.control.recalls(20.0 + CALM_SECONDS - 1, room=10)
    assert not worker.control.is_quiet
    worker.control.recalls(20.0 + CALM_SECONDS, room=10)
    assert worker.control.is_quiet
    assert [event for event, _ in worker.events] == [
        Event.OPENED,
        Event.PROBING,
        Event.CLOSED,
        Event.RECOVERED,
    ]


def test_the_state_is_bounded() -> None:
    worker = Worker(limit=10)
    worker.outage()
    for i in range(50_000):
        worker.look(f"m{i}", 1.0)
        worker.hide(f"m{i}", 1.0, 100.0 + i)
    worker.recover(20.0)
    for i in range(50_000):
        worker.look(f"n{i}", 20.0 + i)
    assert len(worker.control.memory) <= 10
    assert len(worker.control._began) <= 10_000


def test_messages_whose_retry_after_is_over_are_recalled_to_probe_with() -> None:
    """All that has failed is remembered with it; nothing else may come due for half an hour."""
    worker = Worker()
    worker.outage()
    for i in range(Thresholds().failures):
        worker.hide(f"m{i}", 0.0, 1800.0, not_before=4.0)
    due = worker.control.health.next_probe_at + PROBE_GRACE_SECONDS
    assert len(worker.control.recalls(due, room=100)) == 1


@pytest.mark.parametrize(
    ("until", "is_over"), [(4000.0, False), (300.0, True)], ids=["held for long", "due by itself"]
)
def test_the_recovery_goes_on_for_messages_whose_retry_after_is_not_over(
    until: float, is_over: bool
) -> None:
    """Else they came back by themselves, up to hours after the provider."""
    worker = Worker()
    worker.outage()
    worker.hide("m", 1.0, until - 1.0, not_before=300.0)
    worker.recover(10.0)
    now = 10.0 + CALM_SECONDS + 1.0
    assert worker.control.recalls(now, room=100) == []
    assert worker.control.is_quiet is is_over
    recalled = worker.control.recalls(301.0, room=100)
    assert [hidden.message_id for hidden in recalled] == ([] if is_over else ["m"])


def refuse(worker: Worker, now: float, **facts: Any) -> None:
    for i in range(Thresholds().failures + 1):
        worker.control.look_quietly(f"refused {now} {i}", now)
        worker.control.ended(f"refused {now} {i}", Outcome.RETRYABLE, now, **facts)


@pytest.mark.parametrize("has_succeeded", [True, False])
def test_a_worker_that_starts_too_fast_slows_down_and_leaves_the_gate_closed(
    has_succeeded: bool,
) -> None:
    """Beside others, every call may be refused; Retry-After says that the provider is there."""
    worker = Worker()
    if has_succeeded:
        worker.run("sent", None, 0.0)
    refuse(worker, 0.5, retry_after=None if has_succeeded else 3600.0)
    assert worker.control.health.state is State.CLOSED
    assert worker.control.admission.is_limiting
    assert [event for event, _ in worker.events] == [Event.SLOWED]
    assert worker.look("next", 1.5).runs
    assert not worker.look("after it", 1.5).runs


def test_a_provider_that_goes_on_to_refuse_all_of_a_slowed_workers_calls_is_down() -> None:
    worker = Worker()
    refuse(worker, 0.0, retry_after=60.0)
    refuse(worker, Thresholds().probe_interval - 0.1, retry_after=60.0)
    assert worker.control.health.state is State.CLOSED
    refuse(worker, Thresholds().probe_interval, retry_after=60.0)
    assert worker.control.health.state is State.OPEN
    assert worker.control.health.next_probe_at >= 65.0


def test_without_recall_nothing_slows_calls_down_and_the_gate_opens() -> None:
    worker = Worker(limit=0)
    refuse(worker, 0.0, retry_after=60.0)
    assert worker.control.health.state is State.OPEN
