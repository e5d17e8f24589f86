"""How many messages are settled while SQS answers a call."""

from __future__ import annotations

import pytest

from celery_sqs_backoff.worker.pace import Pace


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def work(pace: Pace, clock: Clock, *, call: float, each: float, messages: int = 50) -> None:
    """A full batch comes after ``call`` seconds, and each of its messages takes ``each``."""
    clock.now += call
    pace.answered(call, full=True)
    for left in reversed(range(messages)):
        clock.now += each
        pace.settled(more=left > 0)


def test_nothing_is_counted_on_before_something_is_known(clock: Clock) -> None:
    assert Pace(clock).settled_during_a_call() == 0


@pytest.mark.parametrize(
    ("call", "each", "expected"),
    [(0.0151, 0.001, 15), (0.0151, 0.004, 3), (0.015, 0.1, 0), (0.3, 0.001, 300)],
)
def test_short_tasks_are_settled_while_a_call_is_under_way(
    clock: Clock, call: float, each: float, expected: int
) -> None:
    pace = Pace(clock)
    work(pace, clock, call=call, each=each)
    assert pace.settled_during_a_call() == pytest.approx(expected, abs=1)


def test_time_without_messages_is_not_the_tasks(clock: Clock) -> None:
    pace = Pace(clock)
    for _ in range(5):
        work(pace, clock, call=0.0201, each=0.001)
        clock.now += 3600
    assert pace.settled_during_a_call() == 20


def test_an_answer_that_waited_for_messages_does_not_say_how_long_a_call_takes(
    clock: Clock,
) -> None:
    pace = Pace(clock)
    work(pace, clock, call=0.0201, each=0.001)
    pace.answered(20.0, full=False)
    assert pace.settled_during_a_call() == 20


def test_one_long_task_ends_the_counting_for_a_while(clock: Clock) -> None:
    pace = Pace(clock)
    work(pace, clock, call=0.020, each=0.001)
    work(pace, clock, call=0.020, each=1.0, messages=1)
    assert pace.settled_during_a_call() == 0
