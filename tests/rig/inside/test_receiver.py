"""What a worker's receiver knows of its queues and messages, and of a worker that stops."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import InvalidTaskError

from celery_sqs_backoff.sqs.calls import Calls
from celery_sqs_backoff.worker import strategy
from celery_sqs_backoff.worker.foreign import Foreign
from celery_sqs_backoff.worker.keeper import Keeper
from celery_sqs_backoff.worker.messages import Receiver
from celery_sqs_backoff.worker.window import Window

from .test_payload import ENVELOPE

URL = "https://sqs.example/1/q"


class Sqs:
    """A queue's attributes, and how often they were read."""

    def __init__(self) -> None:
        self.attributes = {"VisibilityTimeout": "30"}
        self.reads = 0

    def get_queue_attributes(self, **_: Any) -> Any:
        self.reads += 1
        return {"Attributes": self.attributes}


class Worker:
    """A receiver of one queue, at a time of our own."""

    def __init__(self) -> None:
        self.now, self.sqs, self.processes = 1_000.0, Sqs(), "2"
        clients: Any = SimpleNamespace(
            settling=lambda url: Calls(self.sqs, url),  # type: ignore[arg-type]
        )
        self.receiver = Receiver(
            Keeper(clock=lambda: self.now),
            clients=clients,
            window=Window(processes=lambda: int(self.processes), multiplier=lambda: 4),
            foreign=Foreign({}, is_registered=lambda name: True, origin="o"),
        )
        self.arrived: list[Any] = []
        self.receiver.deliver = self.arrived.append

    def take(self, handle: str, **options: Any) -> None:
        """Take a message that SQS hands out with this receipt handle."""
        body = json.dumps(ENVELOPE | {"headers": {"task": "t", "id": "i"}})
        message = {"MessageId": "m", "ReceiptHandle": handle, "Body": body, "Attributes": {}}
        self.receiver.take("q", URL, [message], **options)


def test_messages_in_flight() -> None:
    """The number of messages in flight is read once a minute; an old one is forgotten."""
    worker = Worker()
    worker.receiver.read_queue(URL)
    worker.sqs.attributes["ApproximateNumberOfMessagesNotVisible"] = "96000"
    for _ in range(6):
        worker.now += 12
        worker.receiver.read_queue(URL)
    assert worker.sqs.reads == 2
    assert worker.receiver.queue(URL).messages_in_flight == 96_000
    worker.sqs.get_queue_attributes = lambda **_: {}  # type: ignore[method-assign]
    worker.now += 60
    assert worker.receiver.read_queue(URL).messages_in_flight == 0


def test_held_already() -> None:
    """A message that this worker holds is not sent on again when SQS hands it out again."""
    worker = Worker()
    worker.take("h1")
    worker.take("h2")
    [arrival] = worker.arrived
    assert arrival.tag == "h1"


def test_age_of_late_answer() -> None:
    """The 12 hours of SQS count from its answer, however late that came."""
    worker = Worker()
    worker.take("h1", seconds_ago=300.0)
    lease = worker.arrived[0].lease
    assert lease.visible_at == 1_000.0 - 300.0 + 30
    assert time.time() - lease.delivery.received_at == pytest.approx(300, abs=5)


def test_no_room_at_stop() -> None:
    """A worker that stops brings nothing forward, and does not ask its pool, which may be gone."""
    worker = Worker()
    assert worker.receiver._room() > 0
    worker.processes = "the pool has gone"
    worker.receiver.close()
    assert worker.receiver._room() == 0


def test_names_in_containers() -> None:
    """Workers of one name in two containers, each process 1 there, have different names."""
    code = (
        "import os; os.getpid = lambda: 1\n"
        "from types import SimpleNamespace\n"
        "from celery_sqs_backoff.worker.receive import name_among_workers\n"
        "print(name_among_workers(SimpleNamespace(hostname='mails@shop')))"
    )
    command = [sys.executable, "-c", code]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(2)]
    assert len({run.stdout for run in runs}) == 2
    assert all("mails@shop" in run.stdout for run in runs)


def test_start_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keywords of ``Task.start_strategy`` are handed on to Celery's strategy."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(
        strategy, "celery_default", lambda task, app, consumer, **kwargs: seen.update(kwargs)
    )
    strategy.default(None, None, SimpleNamespace(), info=print, task_reserved=len)
    assert seen == {"info": print, "task_reserved": len}


def test_lost_before_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that is lost on its way to its strategy is not handed to Celery's."""
    ran: list[Any] = []
    monkeypatch.setattr(
        strategy, "celery_default", lambda *args, **options: lambda *message: ran.append(message)
    )
    worker = Worker()
    worker.take("h1")
    handle = strategy.default(None, None, SimpleNamespace(sqs_receiver=worker.receiver))
    worker.arrived[0].lease.lose()
    handle(SimpleNamespace(delivery_tag="h1", headers={}), None, None, None, [])
    assert ran == []


def test_keys_of_embed() -> None:
    """The keys of what a task is embedded in are text; pickle, unlike JSON, brings others."""
    with pytest.raises(InvalidTaskError):
        strategy._check_arguments([[], {}, {1: 2}])
