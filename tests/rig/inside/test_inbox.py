"""The inbox, which passes received messages from the poller's threads to Celery's event loop."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from celery_sqs_backoff.worker.inbox import Inbox
from celery_sqs_backoff.worker.lease import State

from . import a_lease, a_window


class Worker:
    """An inbox with an event loop that the test turns, and the messages that Celery has got."""

    def __init__(self, *, has_loop: bool = True) -> None:
        self.soon: list[Callable[[], object]] = []
        self.delivered: list[Any] = []
        self.turns = 0
        hub = SimpleNamespace(call_soon=self.soon.append) if has_loop else None
        consumer = SimpleNamespace(hub=hub, pool=None, hostname="w")
        pulse: Any = SimpleNamespace(note_turn=self._note_turn)
        self.inbox = Inbox(consumer, a_window(), pulse)
        connection = SimpleNamespace(_callbacks={"q"}, _deliver=self._deliver)
        self.inbox.channel = SimpleNamespace(
            connection=connection, qos=SimpleNamespace(ack=lambda tag: None)
        )

    def _deliver(self, payload: Any, queue: str) -> None:
        self.delivered.append(payload)
        self.inbox.wake()  # A process that becomes free at this moment also wakes the inbox.

    def _note_turn(self, name: str) -> None:
        self.turns += 1

    def put(self, *payloads: str) -> None:
        for each in payloads:
            facts = {"state": State.HELD, "go_on": None, "source": "q", "keeps_place": False}
            self.inbox.put(a_lease(each, payload=each, **facts))

    def turn(self) -> None:
        soon, self.soon[:] = list(self.soon), []
        for callback in soon:
            callback()


def test_one_turn() -> None:
    """The inbox asks the loop for one turn for many messages, and delivers them in order."""
    worker = Worker()
    worker.put("a", "b", "c")
    assert (worker.delivered, len(worker.soon)) == ([], 1)
    worker.turn()
    assert (worker.delivered, worker.soon) == (["a", "b", "c"], [])
    worker.put("d")
    assert len(worker.soon) == 1


def test_loop_reset() -> None:
    """When kombu resets its loop, the inbox drops waiting messages. It delivers later messages."""
    worker = Worker()
    worker.put("a")
    worker.soon.clear()
    worker.inbox.clear()
    worker.put("b")
    worker.turn()
    assert worker.delivered == ["b"]


def test_without_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an event loop, Celery gets messages by ``drain_events``. Each call is a turn."""
    worker = Worker(has_loop=False)
    worker.put("a")
    assert worker.turns == 0
    worker.inbox.drain_events()
    assert (worker.delivered, worker.turns) == (["a"], 1)
    monkeypatch.setattr("celery_sqs_backoff.worker.inbox._WAIT_SECONDS", 0)
    with pytest.raises(TimeoutError):
        worker.inbox.drain_events()
