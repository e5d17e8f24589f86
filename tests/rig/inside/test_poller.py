"""The threads of a poller, which receives from a queue: how they start, stop and share room."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from celery_sqs_backoff.observe.events import Events
from celery_sqs_backoff.observe.health import Pulse
from celery_sqs_backoff.sqs.calls import Received
from celery_sqs_backoff.worker import poller as module
from celery_sqs_backoff.worker import window as window_module
from celery_sqs_backoff.worker.poller import Poller
from celery_sqs_backoff.worker.window import Window
from tests.support.processes import eventually

from . import a_lease, a_window


class Port:
    """Receives from a queue. A call waits until the test responds with a number of messages."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self._responses: list[int] = []
        self._cond = threading.Condition()
        self._number = itertools.count()

    def receive(self, *, max_messages: int, wait_seconds: int, **_: Any) -> Received:
        with self._cond:
            self.asked.append((max_messages, wait_seconds))
            self._cond.notify_all()
            assert self._cond.wait_for(lambda: self._responses, timeout=10), "nobody responds"
            count = self._responses.pop(0)
            return Received([{"MessageId": f"{next(self._number)}"} for _ in range(count)])

    def respond(self, *counts: int) -> None:
        with self._cond:
            self._responses += counts
            self._cond.notify_all()

    def wait_for_calls(self, calls: int) -> list[tuple[int, int]]:
        with self._cond:
            assert self._cond.wait_for(lambda: len(self.asked) >= calls, timeout=10), self.asked
            return list(self.asked)


class Queue:
    """A poller on a port, and the prefetch window that it shares with other pollers."""

    def __init__(
        self,
        window: Window,
        url: str,
        *,
        pulse: Pulse | None = None,
        clock: Callable[[], float] = time.monotonic,
        look: Callable[[], object] = lambda: None,
        port: Any = None,
        **options: Any,
    ) -> None:
        self.port, self.window = Port(), window
        self.held: list[Any] = []
        self.take: Callable[[list[dict[str, Any]]], object] = self._hold
        keeper = SimpleNamespace(
            clock=clock,
            events=Events(),
            pulse=pulse or Pulse(),
            seconds_to_receive_for=lambda queue: None,
        )
        receiver: Any = SimpleNamespace(
            keeper=keeper,
            window=window,
            clients=SimpleNamespace(polling=lambda url: port or self.port),
            read_queue=lambda url: look(),
            take=lambda name, queue, messages, **_: self.take(messages),
        )
        self.poller = Poller(receiver, "q", url, **options)

    def _hold(self, messages: list[dict[str, Any]]) -> None:
        for message in messages:
            self.held.append(a_lease(message["MessageId"]))
            self.window.received(self.held[-1])


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Queue]]:
    monkeypatch.setattr(module, "_AFTER_TOO_SOON_SECONDS", 0.0)
    made: list[Queue] = []

    def make_queue(window: Window | None = None, url: str = "q", **options: Any) -> Queue:
        made.append(Queue(window or a_window(), url, **options))
        return made[-1]

    yield make_queue
    for queue in made:
        queue.poller.stop()
        queue.port.respond(*[0] * 10)


def test_too_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A poller pauses after an empty response if SQS has not waited for messages.

    If SQS has waited, the poller makes the next call at once.
    """
    now, paused = [0.0], []
    port = SimpleNamespace(receive=lambda **_: now.__setitem__(0, now[0] + 0.3) or Received())
    poller = Queue(a_window(), "q", clock=lambda: now[0], port=port).poller
    poller._stopped.clear()
    monkeypatch.setattr(poller._stopped, "wait", paused.append)
    poller._poll()
    assert (now, paused) == ([0.3], [])
    monkeypatch.setattr(port, "receive", lambda **_: Received())
    poller._poll()
    assert paused == [1.0]


def test_quiet_queues(make: Callable[..., Queue]) -> None:
    """Long polls on 20 quiet queues do not take room from a busy queue."""
    window = a_window()
    quiet = [make(window, f"https://sqs.region{n}.example/1/mail") for n in range(20)]
    for queue in quiet:
        queue.poller.start()
    for queue in quiet:
        assert queue.port.wait_for_calls(1) == [(8, 20)]
    busy = make(window, "https://sqs.example/1/mail")
    busy.poller.start()
    busy.port.respond(8)
    eventually(lambda: len(busy.held) == 8)
    for lease in busy.held:
        lease.free()
    assert busy.port.wait_for_calls(2) == [(8, 20)] * 2


def test_same_name_elsewhere(make: Callable[..., Queue]) -> None:
    """The heartbeat watches two pollers if two queues in different Regions have the same name."""
    pulse = Pulse()
    for region in ("eu-west-1", "us-east-1"):
        make(url=f"https://sqs.{region}.amazonaws.com/1/mail", pulse=pulse).poller.start()
    assert len(pulse._loops) == 2


def test_behind_waits(make: Callable[..., Queue], monkeypatch: pytest.MonkeyPatch) -> None:
    """A free place in the window does not go to a queue with too many unconfirmed settlements."""
    monkeypatch.setattr(window_module, "_LOOK_AGAIN_SECONDS", 60.0)
    behind: list[str] = []
    window = a_window(1, 1, waiting_for=lambda url: 1_001 * (url in behind))
    runs = a_lease("runs")
    window.received(runs)
    stuck, other = make(window, "stuck"), make(window, "other")
    for each in (stuck, other):
        each.poller.start()
    behind.append("stuck")
    runs.free()
    other.port.wait_for_calls(1)
    assert stuck.port.asked == []


def test_look_without_room(make: Callable[..., Queue], monkeypatch: pytest.MonkeyPatch) -> None:
    """A poller reads its queue's attributes now and then, even if a long task leaves no room."""
    monkeypatch.setattr(module, "_WAIT_FOR_ROOM_SECONDS", 0.05)
    monkeypatch.setattr(window_module, "_LOOK_AGAIN_SECONDS", 0.01)
    looks: list[int] = []
    queue = make(a_window(1, 1), look=lambda: looks.append(len(queue.port.asked)))
    queue.port.respond(1)
    queue.poller.start()
    eventually(lambda: looks.count(1) >= 2)
    assert len(queue.port.asked) == 1


def test_stop(make: Callable[..., Queue]) -> None:
    """A stopped poller makes no further calls, and passes on messages that still arrive."""
    queue = make()
    queue.poller.start()
    queue.port.wait_for_calls(1)
    queue.poller.stop()
    queue.port.respond(2)
    eventually(lambda: len(queue.held) == 2)
    eventually(lambda: queue.poller._main is None)
    assert len(queue.port.asked) == 1


def test_start_during_call(make: Callable[..., Queue]) -> None:
    """A poller that is stopped and started during a call goes on with this call."""
    queue = make()
    queue.poller.start()
    queue.port.wait_for_calls(1)
    queue.poller.stop()
    queue.poller.start()
    assert len(queue.port.asked) == 1
    queue.port.respond(0)
    queue.port.wait_for_calls(2)


def test_start_after_end(make: Callable[..., Queue]) -> None:
    """A poller whose threads have ended can start again."""
    queue = make(a_window(2, 32))
    queue.poller.start()
    queue.port.respond(*[10] * 4)
    queue.port.wait_for_calls(5)
    queue.poller.stop()
    queue.port.respond(*[0] * 3)
    eventually(lambda: queue.poller._main is None and not queue.poller._helpers)
    calls = len(queue.port.asked)
    queue.poller.start()
    queue.port.wait_for_calls(calls + 1)


def test_hangs(make: Callable[..., Queue]) -> None:
    """The heartbeat reports a fault if a poller hangs outside of its calls."""
    now = [0.0]
    pulse = Pulse(clock=lambda: now[0])
    queue = make(a_window(100), pulse=pulse)
    hangs, go_on = threading.Event(), threading.Event()

    def hang(messages: object) -> None:
        hangs.set()
        go_on.wait(20)

    queue.take = hang
    queue.poller.start()
    queue.port.respond(10)
    assert hangs.wait(10)
    now[0] += 65
    try:
        assert any("the poller of q" in fault for fault in pulse.faults())
    finally:
        go_on.set()


def test_long_poll_is_no_fault(make: Callable[..., Queue]) -> None:
    """A long poll is no fault until it takes longer than the timeouts of the client allow."""
    now = [0.0]
    pulse = Pulse(clock=lambda: now[0])
    queue = make(pulse=pulse)
    queue.poller.start()
    queue.port.wait_for_calls(1)
    now[0] += 36
    assert pulse.faults() == []
    now[0] += 60
    assert pulse.faults() == ["the poller of q has completed no turn for 96 s"]


def test_no_thread_left(make: Callable[..., Queue], monkeypatch: pytest.MonkeyPatch) -> None:
    """If a poller cannot start more threads, one thread receives a backlog without a pause."""
    queue = make(a_window(100))
    pauses: list[float] = []
    monkeypatch.setattr(queue.poller._stopped, "wait", pauses.append)
    queue.poller.start()

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", start)
        queue.port.respond(10, 10)
        queue.port.wait_for_calls(3)
    assert (len(queue.held), pauses) == (20, [])
