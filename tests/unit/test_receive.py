"""What Celery's objects get of the worker's receive, on stand-ins for them."""

from __future__ import annotations

import subprocess
import sys
import threading
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from celery_sqs_backoff.sqs.calls import Received
from celery_sqs_backoff.sqs.queues import Queue
from celery_sqs_backoff.worker.inbox import Arrival
from celery_sqs_backoff.worker.keeper import Keeper
from celery_sqs_backoff.worker.lease import State
from celery_sqs_backoff.worker.receive import Receive


class Celery:
    """A consumer and its controller, with one process that is taken by each task."""

    def __init__(self) -> None:
        self.free = 1
        self.kept: list[str] = []
        self.controller = SimpleNamespace(
            autoscaler=None, _process_task=self._process_task, _quick_release=self._release
        )
        self.consumer = SimpleNamespace(
            app=SimpleNamespace(conf={}),
            hostname="w",
            strategies={},
            hub=SimpleNamespace(call_soon=lambda callback: self.asked.append("before")),
            pool=SimpleNamespace(num_processes=1),
            controller=self.controller,
            on_task_request=lambda request: self.controller._process_task(request),
            prefetch_multiplier=4,
        )
        self.asked: list[str] = []
        self.receive = Receive(self.consumer, Keeper())
        self.receive.receiver.keep = lambda lease, headers, what: self.kept.append(what)

    def _process_task(self, request: Any) -> None:
        self.free -= 1
        request.start()

    def _release(self) -> None:
        self.free += 1


def _request(start: Any) -> Any:
    keeper = SimpleNamespace(clock=lambda: 0.0)
    lease = SimpleNamespace(
        state=State.HELD, handed_to_pool=lambda: False, keeper=keeper, visible_at=30.0
    )
    message = SimpleNamespace(delivery_tag="h")
    return SimpleNamespace(lease=lease, message=message, start=start, name="t", id="i")


def test_a_task_that_does_not_fit_through_the_pools_pipe_leaves_its_process_free() -> None:
    celery = Celery()

    def too_deep() -> None:
        raise RecursionError

    celery.consumer.on_task_request(_request(too_deep))
    assert celery.kept == ["the pool cannot take it (RecursionError)"]
    assert celery.free == 1
    celery.consumer.on_task_request(_request(lambda: None))
    assert celery.free == 0


def test_an_arrival_wakes_the_event_loop_by_what_has_replaced_its_method() -> None:
    celery = Celery()
    celery.consumer.hub.call_soon = lambda callback: celery.asked.append("after")
    celery.receive.receiver.deliver(Arrival("q", {}, "h", None))  # type: ignore[arg-type]
    assert celery.asked == ["after"]


class Connection:
    """kombu's, with its channel; the first of its channels is that of the remote control."""

    def __init__(self) -> None:
        self._callbacks: dict[str, Any] = {}
        self.channel = SimpleNamespace(connection=self)

    def _deliver(self, payload: Any, queue: str) -> None:
        raise AssertionError("kombu would reject it on a channel that knows of no lease")


def test_a_message_of_a_queue_that_was_cancelled_meanwhile_is_given_back() -> None:
    celery, connection, given_back = Celery(), Connection(), []
    celery.receive._channel = connection.channel
    lease: Any = SimpleNamespace(give_back=lambda: given_back.append("h"))
    celery.receive._deliver(Arrival("q", {}, "h", lease))
    assert given_back == ["h"]


def test_limits_that_the_autoscaler_is_told_later_count() -> None:
    celery = Celery()
    celery.controller.autoscaler = SimpleNamespace(max_concurrency=4)
    assert celery.receive._capacity._processes() == 4
    celery.controller.autoscaler.max_concurrency = 10
    assert celery.receive._capacity._processes() == 10


class Port:
    """Of a queue without messages: its long polls end when the test says so."""

    def __init__(self, url: str, asked: SimpleQueue[str], over: threading.Event) -> None:
        self._url, self._asked, self._over = url, asked, over

    def receive(self, **_: Any) -> Received:
        self._asked.put(self._url)
        self._over.wait(10)
        return Received([])


def test_a_long_poll_takes_no_room_from_a_queue_of_the_same_name_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In another Region, or account: there are calls for both, whichever was first."""
    asked: SimpleQueue[str] = SimpleQueue()
    over = threading.Event()
    urls = [f"https://sqs.{region}.amazonaws.com/1/mail" for region in ("eu-west-1", "us-east-1")]
    receive = Celery().receive
    receive._channel = SimpleNamespace(
        _resolve_queue_url=lambda name: urls[int(name)],
        transport_options={},
        connection=SimpleNamespace(polling_interval=1.0),
    )
    monkeypatch.setattr(receive._clients, "polling", lambda url: Port(url, asked, over))
    monkeypatch.setattr(receive.receiver, "read_queue", Queue)
    receive._start("0")
    try:
        assert asked.get(timeout=10) == urls[0]
        receive._start("1")
        assert asked.get(timeout=10) == urls[1]
        assert len(receive._keeper.pulse._loops) == 2, "each is missed if it dies"
    finally:
        over.set()
        for poller in receive._pollers.values():
            poller.stop()


def test_workers_of_one_name_in_two_containers_are_told_apart() -> None:
    """Each is process 1 there. In the store one would write over what the other has written."""
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
