"""How messages get into Celery's loop: one turn for many, after a reset, and without a loop."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from celery_sqs_backoff.worker.inbox import Inbox
from celery_sqs_backoff.worker.window import Window


class Worker:
    """An inbox, its loop turned by hand, and the messages that Celery got."""

    def __init__(self, *, has_loop: bool = True) -> None:
        self.window = Window(processes=lambda: 1, multiplier=lambda: 4)
        self.soon: list[Callable[[], object]] = []
        self.delivered: list[Any] = []
        self.turns = 0
        self.inbox = Inbox(
            SimpleNamespace(  # type: ignore[arg-type]
                deliver=self._deliver,
                window=self.window,
                consumer=SimpleNamespace(
                    hub=SimpleNamespace(call_soon=self.soon.append) if has_loop else None,
                    pool=None,
                ),
                keeper=SimpleNamespace(pulse=SimpleNamespace(note_turn=self._note_turn)),
            )
        )

    def _deliver(self, arrival: Any) -> None:
        self.delivered.append(arrival)
        self.inbox.wake()  # as a place that becomes free meanwhile

    def _note_turn(self, name: str) -> None:
        self.turns += 1

    def put(self, *arrivals: Any) -> None:
        for arrival in arrivals:
            self.inbox.put(arrival)

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


def test_loop_reset() -> None:
    """Messages that wait when kombu resets its loop are forgotten; later ones are delivered."""
    worker = Worker()
    worker.put("a")
    worker.soon.clear()
    worker.inbox.clear()
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
