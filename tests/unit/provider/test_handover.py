"""A worker stops: what it has hidden comes back soon, spread, and never too early."""

from __future__ import annotations

import threading
from random import Random
from typing import Any

import pytest

from celery_sqs_backoff import Outcome
from celery_sqs_backoff.provider.control import Control
from celery_sqs_backoff.provider.handover import (
    LEAST_GAIN_SECONDS,
    LONGEST_SPREAD_SECONDS,
    Nearer,
    nearer,
)
from celery_sqs_backoff.provider.health import State, Thresholds
from celery_sqs_backoff.provider.recall import MARGIN_SECONDS, Hidden
from celery_sqs_backoff.retry.policies import FullJitter
from celery_sqs_backoff.sqs.errors import Failure, Kind
from celery_sqs_backoff.worker.handover import batches, hand_over

NOW = 1000.0
HOUR = 3600.0


def hidden(name: str, until: float = NOW + HOUR, *, queue: str = "mail", **facts: Any) -> Hidden:
    return Hidden(name, f"handle of {name}", queue, until, **facts)


def control(*waiting: Hidden) -> Control:
    """Of a provider that is down."""
    made = Control(Thresholds(), Random(1))
    for i in range(6):
        made.look(
            str(i), NOW, policy=FullJitter(), looks=1, longest=HOUR, ahead=0, longest_wait=2.0
        )
        made.ended(str(i), Outcome.RETRYABLE, NOW)
    assert made.health.state is State.OPEN
    for each in waiting:
        assert made.hidden(each, NOW)
    return made


def names(found: list[Nearer]) -> list[str]:
    return [each.hidden.message_id for each in found]


def test_few_messages_come_back_within_seconds() -> None:
    found = control(*(hidden(f"m{i}") for i in range(50))).hand_over(NOW)
    assert len(found) == 50
    assert max(each.seconds for each in found) <= 5


def test_a_deploy_while_the_provider_is_well_leaves_messages_their_own_delays() -> None:
    made = Control(Thresholds(), Random(1))
    made.ended("m", Outcome.RETRYABLE, NOW)
    assert made.hidden(hidden("m"), NOW)
    assert made.hand_over(NOW) == []


def test_many_messages_are_spread_over_three_minutes() -> None:
    found = nearer((hidden(f"m{i}") for i in range(9000)), NOW, Random(1), is_down=True)
    assert len(found) == 9000
    seconds = [each.seconds for each in found]
    assert max(seconds) == LONGEST_SPREAD_SECONDS
    assert max(map(seconds.count, set(seconds))) < 120, "about 50 in each second"


def test_messages_of_one_group_come_back_together() -> None:
    waiting = [hidden(f"m{i}", group="g") for i in range(9)]
    waiting += [hidden(f"other {i}") for i in range(200)]
    found = nearer(waiting, NOW, Random(1), is_down=True)
    assert len({each.seconds for each in found[:9]}) == 1


def test_none_comes_back_before_the_provider_allows() -> None:
    found = control(hidden("m", not_before=NOW + 599.5)).hand_over(NOW)
    assert [each.seconds for each in found] == [600]


def test_the_furthest_due_comes_first_and_what_returns_soon_is_left_alone() -> None:
    held = {"b": NOW + 200, "c": NOW + 300, "soon": NOW + 20, "a": NOW + 100}
    found = control(*(hidden(name, until) for name, until in held.items())).hand_over(NOW)
    assert names(found) == ["c", "b", "a"]
    late = hidden("late", NOW + 200, not_before=NOW + 200 - LEAST_GAIN_SECONDS)
    assert control(late).hand_over(NOW) == []


def test_a_hold_that_may_have_ended_is_left_alone() -> None:
    made = control(hidden("m", NOW + HOUR))
    assert made.hand_over(NOW + HOUR - MARGIN_SECONDS) == []


def test_a_message_that_must_run_at_its_next_receive_stays_while_the_provider_is_down() -> None:
    waiting = [hidden("m", next_is_last=True)]
    assert nearer(waiting, NOW, Random(1), is_down=True) == []
    assert names(nearer(waiting, NOW, Random(1), is_down=False)) == ["m"]


def test_what_is_handed_over_is_forgotten() -> None:
    made = control(hidden("m"))
    assert names(made.hand_over(NOW)) == ["m"]
    assert made.hand_over(NOW) == []


class Port:
    """Two queues' calls; one may hang, or fail."""

    def __init__(self, *, hangs: bool = False, failure: Failure | None = None) -> None:
        self.calls: list[tuple[str, int]] = []
        self.may_go_on = threading.Event()
        if not hangs:
            self.may_go_on.set()
        self._failure = failure

    def of(self, url: str) -> Any:
        self.url = url
        return self

    def change_visibility(self, entries: list[tuple[str, int]]) -> list[Failure | None]:
        self.calls.append((self.url, len(entries)))
        self.may_go_on.wait(60)
        return [self._failure] * len(entries)


def test_calls_are_of_one_queue_and_ten_messages_at_most() -> None:
    found = [Nearer(hidden(f"m{i}", NOW + HOUR - i, queue="ab"[i % 2]), i) for i in range(34)]
    port = Port()
    assert hand_over(found, port.of) == 34
    assert sorted(count for _, count in port.calls) == [7, 7, 10, 10]
    first = next(batches(found))
    assert first == ("a", [(f"handle of m{i}", i) for i in range(0, 20, 2)])


def of_one_queue(calls: int) -> list[Nearer]:
    return [Nearer(hidden(f"m{i}"), 1) for i in range(10 * calls)]


def test_a_call_that_hangs_does_not_hold_up_the_end_of_the_worker() -> None:
    port = Port(hangs=True)
    assert hand_over(of_one_queue(30), port.of, longest_seconds=0.05) == 0
    assert len(port.calls) <= 8
    port.may_go_on.set()


@pytest.mark.parametrize(
    ("is_of_call", "calls"), [(True, range(1, 9)), (False, [30])], ids=["call", "entry"]
)
def test_a_queue_that_is_away_is_not_called_again_and_again(
    is_of_call: bool, calls: range | list[int]
) -> None:
    port = Port(failure=Failure(Kind.UNREACHABLE, "x", is_of_call=is_of_call))
    assert hand_over(of_one_queue(30), port.of) == 0
    assert len(port.calls) in calls


def test_without_another_thread_nothing_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert hand_over(of_one_queue(1), Port().of) == 0
