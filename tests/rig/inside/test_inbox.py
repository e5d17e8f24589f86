"""How messages get into Celery's loop: one turn for many, after a reset, and without a loop."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from celery_sqs_backoff.worker.inbox import Arrival, Inbox
from celery_sqs_backoff.worker.lease import State
from celery_sqs_backoff.worker.window import Window


class Worker:
    """An inbox, its loop turned by hand, and the messages that Celery got."""

    def __init__(self, *, has_loop: bool = True) -> None:
        self.window = Window(processes=lambda: 1, multiplier=lambda: 4)
        self.soon: list[Callable[[], object]] = []
        self.delivered: list[str] = []
        self.turns = 0
        self.inbox = Inbox(
            deliver=self._deliver,
            window=self.window,
            is_stopping=lambda: False,
            soon=self.soon.append if has_loop else None,
            one_at_a_time=False,
            on_error=print,
            on_turn=self._note_turn,
        )

    def _deliver(self, arrival: Arrival) -> None:
        self.delivered.append(arrival.tag)
        self.inbox.wake()  # as a place that becomes free meanwhile

    def _note_turn(self) -> None:
        self.turns += 1

    def put(self, *tags: str, state: State = State.HELD) -> None:
        for tag in tags:
            self.window.received(tag)
            lease = SimpleNamespace(state=state, keeps_place=False)
            self.inbox.put(Arrival("q", {}, tag, lease))  # type: ignore[arg-type]

    def turn(self) -> None:
        soon, self.soon[:] = list(self.soon), []
        for callback in soon:
            callback()


def test_one_turn() -> None:
    """Many messages ask the loop for one turn, are delivered in order, and ask for no other."""
    worker = Worker()
    worker.put("a", "b", "c")
    assert (worker.delivered, len(worker.soon)) == ([], 1)
    worker.turn()
    assert (worker.delivered, worker.soon) == (["a", "b", "c"], [])
    worker.put("d")
    assert len(worker.soon) == 1


@pytest.mark.parametrize("state", [State.LOST, State.RELEASED])
def test_no_longer_held(state: State) -> None:
    """A message that is lost or given back while it waits is not delivered."""
    worker = Worker()
    worker.put("a", state=state)
    worker.turn()
    assert (worker.delivered, worker.window.held) == ([], 0)


def test_loop_reset() -> None:
    """Messages that wait when kombu resets its loop are forgotten; later ones are delivered."""
    worker = Worker()
    worker.put("a")
    worker.soon.clear()
    worker.inbox.clear()
    assert worker.window.held == 0
    worker.put("b")
    worker.turn()
    assert worker.delivered == ["b"]


def test_without_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an event loop Celery waits for messages here, and each look counts as a turn."""
    worker = Worker(has_loop=False)
    worker.put("a")
    assert worker.turns == 0
    worker.inbox.drain_events()
    assert (worker.delivered, worker.turns) == (["a"], 1)
    monkeypatch.setattr("celery_sqs_backoff.worker.inbox._WAIT_SECONDS", 0)
    with pytest.raises(TimeoutError):
        worker.inbox.drain_events()
