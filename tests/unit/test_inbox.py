"""How received messages get into Celery's loop."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from celery_sqs_backoff.worker.capacity import Capacity
from celery_sqs_backoff.worker.inbox import Arrival, Inbox
from celery_sqs_backoff.worker.lease import State


class Worker:
    """An inbox, its loop turned by hand, and what Celery got."""

    def __init__(self, *, one_at_a_time: bool = False, has_loop: bool = True) -> None:
        self.capacity = Capacity(processes=lambda: 1, multiplier=lambda: 4)
        self.soon: list[Callable[[], object]] = []
        self.delivered: list[str] = []
        self.errors: list[tuple[str, str]] = []
        self.stopping = False
        self.starts = True
        self.turns = 0
        self.inbox = Inbox(
            deliver=self._deliver,
            capacity=self.capacity,
            is_stopping=lambda: self.stopping,
            soon=self.soon.append if has_loop else None,
            one_at_a_time=one_at_a_time,
            on_error=lambda arrival, exc: self.errors.append((arrival.tag, type(exc).__name__)),
            on_turn=self._note_turn,
        )

    def _deliver(self, arrival: Arrival) -> None:
        if "broken" in arrival.tag:
            raise TypeError("a list where a dict is due")
        self.delivered.append(arrival.tag)
        if self.starts:
            self.capacity.started(arrival.tag)

    def _note_turn(self) -> None:
        self.turns += 1

    def put(self, tag: str, state: State = State.HELD) -> Any:
        lease = SimpleNamespace(state=state, keeps_place=False)
        self.capacity.received(tag)
        self.inbox.put(Arrival("q", {}, tag, lease))  # type: ignore[arg-type]
        return lease

    def turn(self) -> None:
        soon, self.soon[:] = list(self.soon), []
        for callback in soon:
            callback()


def test_messages_are_delivered_in_the_loop_and_in_order() -> None:
    worker = Worker()
    for tag in "abc":
        worker.put(tag)
    assert worker.delivered == []
    assert len(worker.soon) == 1, "one callback for all of them"
    worker.turn()
    assert worker.delivered == ["a", "b", "c"]


def test_what_ends_a_delivery_asks_for_no_other_turn_of_the_loop() -> None:
    """A message that is hidden as it is delivered frees its place; nothing is left to deliver."""
    worker = Worker()
    worker.starts = False
    deliver = worker.inbox._deliver
    worker.inbox._deliver = lambda arrival: (deliver(arrival), worker.inbox.wake())
    for tag in "ab":
        worker.put(tag)
    worker.turn()
    assert worker.delivered == ["a", "b"]
    assert worker.soon == []
    worker.put("c")
    assert len(worker.soon) == 1


def test_where_a_task_blocks_the_loop_each_waits_for_the_one_before() -> None:
    worker = Worker(one_at_a_time=True)
    for tag in "ab":
        worker.put(tag)
    worker.turn()
    worker.turn()
    assert worker.delivered == ["a"]
    worker.capacity.freed("a")
    worker.turn()
    assert worker.delivered == ["a", "b"]


def test_a_held_eta_does_not_keep_solo_from_working() -> None:
    worker = Worker(one_at_a_time=True)
    worker.starts = False
    for tag in "ab":
        worker.put(tag)
        worker.turn()
    assert worker.delivered == ["a", "b"]


@pytest.mark.parametrize("state", [State.LOST, State.RELEASED])
def test_a_message_that_is_no_longer_held_is_not_delivered(state: State) -> None:
    worker = Worker()
    worker.put("a", state)
    worker.turn()
    assert worker.delivered == []
    assert worker.capacity.held == 0


def test_nothing_is_delivered_once_the_worker_stops() -> None:
    worker = Worker()
    worker.put("a")
    worker.stopping = True
    worker.turn()
    assert worker.delivered == []


def test_a_message_that_celery_cannot_take_does_not_stop_the_others() -> None:
    worker = Worker()
    for tag in ("broken", "good"):
        worker.put(tag)
    worker.turn()
    assert worker.delivered == ["good"]
    assert worker.errors == [("broken", "TypeError")]


def test_a_message_that_starts_later_leaves_its_place_to_others() -> None:
    worker = Worker()
    worker.starts = False
    worker.put("a")
    worker.turn()
    assert worker.capacity._blocked == {"a"}
    worker.capacity.started("a")
    assert worker.capacity._blocked == set()


def test_what_waits_when_the_loop_was_reset_is_forgotten_and_later_messages_are_not() -> None:
    """kombu's hub drops its callbacks; whoever clears gives the leases back."""
    worker = Worker()
    worker.put("a")
    worker.soon.clear()
    worker.inbox.clear()
    worker.put("b")
    worker.turn()
    assert worker.delivered == ["b"]


def test_without_a_loop_celery_waits_for_messages_here(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(has_loop=False)
    worker.put("a")
    worker.inbox.drain_events()
    assert worker.delivered == ["a"]
    monkeypatch.setattr("celery_sqs_backoff.worker.inbox._WAIT_SECONDS", 0)
    with pytest.raises(TimeoutError):
        worker.inbox.drain_events()


def test_a_loop_without_events_turns_when_it_looks_for_messages() -> None:
    """gevent's and eventlet's timers run beside Celery's loop, also while that hangs."""
    worker = Worker(has_loop=False)
    worker.put("a")
    assert worker.turns == 0
    worker.inbox.drain_events()
    assert worker.turns == 1
