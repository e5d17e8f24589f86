"""Slots at an agreed rate: near ones are waited for, others hide a message until they are near."""

from __future__ import annotations

import heapq
import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_sqs_backoff.provider.rate import (
    LATEST_SECONDS,
    NEW_SECONDS,
    RETURN_SHARE,
    RETURNED_SECONDS,
    Departure,
    Line,
    Place,
    Times,
    assign,
    longest_wait,
)


def slots(*at: float) -> list[Place]:
    return [Place(each, is_slot=True) for each in at]


def started(departure: Departure[str]) -> list[str]:
    return [key for key, _ in departure.start]


def test_slots_are_one_over_the_rate_apart() -> None:
    places, times = assign(Times(), 5.0, [10.0] * 3, rate=10.0)
    assert [place.at for place in places] == pytest.approx([5.0, 5.1, 5.2])
    assert times.free_at == pytest.approx(5.3)


def test_slots_of_the_past_cannot_be_taken() -> None:
    places, _ = assign(Times(free_at=7.0), 1000.0, [10.0, 10.0], rate=1.0)
    assert places == slots(1000.0, 1001.0)


def test_a_message_that_may_not_wait_until_its_slot_is_told_when_to_return() -> None:
    places, times = assign(Times(free_at=20.0), 0.0, [1.0, 1.0, 1.0], rate=1.0)
    assert not any(place.is_slot for place in places)
    apart = 1 / RETURN_SHARE
    assert [place.at for place in places] == pytest.approx([20.0, 20.0 + apart, 20.0 + 2 * apart])
    assert times.free_at == 20.0, "no slot is held for who is not there"


def test_a_returned_message_gets_a_slot_where_a_new_one_does_not() -> None:
    new, returned = (
        longest_wait(is_returned=is_returned, must_stay=False) for is_returned in (False, True)
    )
    places, _ = assign(Times(free_at=5.0), 0.0, [new, returned], rate=1.0)
    assert [place.is_slot for place in places] == [False, True]
    assert (new, returned) == (NEW_SECONDS, RETURNED_SECONDS)


def test_a_message_that_must_not_be_hidden_waits_as_long_as_it_takes() -> None:
    longest = longest_wait(is_returned=False, must_stay=True)
    places, _ = assign(Times(free_at=1e6), 0.0, [longest], rate=1.0)
    assert places == slots(1e6)


def test_nobody_changes_nothing() -> None:
    assert assign(Times(7.0, 8.0), 1.0, [], rate=5.0) == ([], Times(7.0, 8.0))


def give(line: Line[str], *places: Place) -> None:
    line.give(line.lacking(), places)


def test_messages_start_at_their_slots() -> None:
    line: Line[str] = Line()
    line.join("a", 1.0)
    line.join("b", 2.0)
    assert line.lacking() == [("a", 1.0), ("b", 2.0)]
    give(line, *slots(0.0, 1.0))
    assert started(line.depart(0.01)) == ["a"]
    assert line.next_at() == 1.0
    assert started(line.depart(0.9)) == []
    assert started(line.depart(1.0)) == ["b"]
    assert (line.next_at(), len(line)) == (None, 0)


def test_messages_without_a_slot_leave() -> None:
    line: Line[str] = Line()
    line.join("a", 1.0)
    give(line, Place(30.0, is_slot=False))
    assert line.depart(0.0).hide == [("a", 30.0)]
    assert len(line) == 0


def test_places_of_messages_that_are_not_there_are_lost() -> None:
    line: Line[str] = Line()
    line.join("a", 1.0)
    give(line, *slots(0.0, 1.0))
    assert len(line) == 1


def test_a_slot_is_not_used_late() -> None:
    line: Line[str] = Line()
    line.join("a", 3.0)
    give(line, *slots(1.0))
    departure = line.depart(1.0 + LATEST_SECONDS + 0.1)
    assert (started(departure), departure.missed) == ([], 1)
    assert line.lacking() == [("a", 3.0)]


def test_a_slot_is_for_the_message_that_has_waited_longest() -> None:
    line: Line[str] = Line()
    for name in "abc":
        line.join(name, 3.0)
    give(line, *slots(1.0, 2.0, 3.0))
    assert started(line.depart(1.5)) == []
    assert line.lacking() == [("c", 3.0)], "the last lacks the one that was lost"
    assert started(line.depart(2.0)) == ["a"]
    assert started(line.depart(3.0)) == ["b"]


def test_a_slot_waits_a_little_for_room() -> None:
    line: Line[str] = Line()
    line.join("a", 3.0)
    give(line, *slots(1.0))
    assert started(line.depart(1.0, most=0)) == []
    assert started(line.depart(1.0 + LATEST_SECONDS / 2, most=1)) == ["a"]


def test_messages_that_are_settled_use_no_slots() -> None:
    over: set[str] = set()
    line = Line(over.__contains__)
    for name in "abcd":
        line.join(name, 3.0)
    line.give(line.lacking()[:3], slots(1.0, 2.0, 3.0))
    over |= {"a", "d"}
    assert line.lacking() == []
    assert [started(line.depart(at)) for at in (1.0, 2.0)] == [["b"], ["c"]]
    assert (len(line), line.next_at()) == (0, None), "no slot is left to nobody"


def test_a_place_to_return_is_for_the_message_that_it_was_given_for() -> None:
    """The line has moved on while the store was asked: another one must not be hidden."""
    line: Line[str] = Line()
    line.join("must stay", math.inf)
    give(line, *slots(1.0))
    line.join("a", 1.0)
    asked = line.lacking()
    line.depart(5.0)
    line.give(asked, [Place(30.0, is_slot=False)])
    assert line.depart(5.0).hide == [("a", 30.0)]
    assert line.lacking() == [("must stay", math.inf)]


@given(
    seed=st.integers(0, 10_000),
    rate=st.sampled_from([0.5, 3.0, 50.0]),
    workers=st.integers(1, 5),
    latest=st.sampled_from([0.0, 1.0, 5.0]),
)
@settings(max_examples=25, deadline=None)
def test_a_fleet_holds_the_rate_uses_it_and_hides_a_message_seldom(
    seed: int, rate: float, workers: int, latest: float
) -> None:
    """300 messages; any worker receives them, in any order; hidden ones return late."""
    rng, times, messages = Random(seed), Times(), 300
    lines: list[Line[int]] = [Line() for _ in range(workers)]
    visible, hidden = list(range(messages)), list[tuple[float, int]]()
    receives, runs, receive_at = [0] * messages, list[float](), 0.0
    while len(runs) < messages:
        ahead = [at for line in lines if (at := line.next_at()) is not None]
        now = min([*ahead, *([receive_at] if visible else []), *(hidden[0][:1] if hidden else [])])
        while hidden and hidden[0][0] <= now:
            visible.append(heapq.heappop(hidden)[1])
        if visible and receive_at <= now:
            number = visible.pop(rng.randrange(len(visible)))
            receives[number] += 1
            receive_at = now + 1 / 200
            is_returned = receives[number] > 1
            longest = longest_wait(is_returned=is_returned, must_stay=False)
            rng.choice(lines).join(number, longest)
        for line in lines:
            asked = line.lacking()
            places, times = assign(times, now, [seconds for _, seconds in asked], rate=rate)
            line.give(asked, places)
            departure = line.depart(now)
            runs += [now] * len(departure.start)
            for number, until in departure.hide:
                returns = now + max(1.0, round(until - now)) + rng.uniform(0.0, latest)
                heapq.heappush(hidden, (returns, number))
    first_of_a_second = 0
    for index, start in enumerate(runs):
        while runs[first_of_a_second] <= start - 1 + 1e-9:
            first_of_a_second += 1
        assert index - first_of_a_second + 1 <= math.ceil(rate)
    shortest = (messages - 1) / rate
    assert runs[-1] <= shortest / 0.94 + 2 + latest
    assert max(receives) <= 4
