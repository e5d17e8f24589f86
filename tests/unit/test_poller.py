"""The threads that receive: when they ask, for how much, and what does not end them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_sqs_backoff.observe.events import ReceivingPaused
from celery_sqs_backoff.observe.health import Pulse
from celery_sqs_backoff.sqs.calls import Received
from celery_sqs_backoff.sqs.errors import Failure, Kind
from celery_sqs_backoff.worker import capacity as capacity_module
from celery_sqs_backoff.worker import poller as module
from celery_sqs_backoff.worker.capacity import Capacity
from celery_sqs_backoff.worker.poller import Poller
from tests.support.processes import eventually

FAILED = Failure(Kind.UNREACHABLE, "ConnectTimeoutError")


class Port:
    """The port of one queue: its calls wait until the test responds."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self._responses: list[Any] = []
        self._cond = threading.Condition()

    def receive(self, *, max_messages: int, wait_seconds: int, **_: Any) -> Received:
        with self._cond:
            self.asked.append((max_messages, wait_seconds))
            self._cond.notify_all()
            assert self._cond.wait_for(lambda: self._responses, timeout=10), "nobody responds"
            response = self._responses.pop(0)
        if callable(response):
            response = response(max_messages)
        if isinstance(response, BaseException):
            raise response
        return Received(failure=response) if isinstance(response, Failure) else Received(response)

    def respond(self, *responses: Any) -> None:
        with self._cond:
            self._responses += responses
            self._cond.notify_all()

    def wait_for_calls(self, calls: int) -> list[tuple[int, int]]:
        with self._cond:
            assert self._cond.wait_for(lambda: len(self.asked) >= calls, timeout=10), self.asked
            return list(self.asked)


class Queue:
    """A poller on a port, and the capacity that it shares with others."""

    def __init__(
        self, capacity: Capacity, name: str = "q", pulse: Pulse | None = None, **options: Any
    ) -> None:
        self.port, self.capacity, self.name = Port(), capacity, name
        self.held: list[str] = []
        self.take: Callable[[list[dict[str, Any]]], object] = self._hold
        self.poller = Poller(
            name,
            calls=self.port,  # type: ignore[arg-type]
            capacity=capacity,
            take=lambda messages, seconds_ago, hidden_seconds: self.take(messages),
            pulse=pulse,
            **options,
        )

    def _hold(self, messages: list[dict[str, Any]]) -> None:
        for message in messages:
            self.capacity.received(message["tag"])
            self.held.append(message["tag"])

    def settle(self, messages: int) -> None:
        for _ in range(messages):
            self.capacity.freed(self.held.pop())


def messages(count: int) -> list[dict[str, Any]]:
    now = time.monotonic_ns()
    return [{"tag": f"{now}-{n}", "MessageId": f"{now}-{n}"} for n in range(count)]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses are noted and not made."""
    pauses: list[float] = []
    delay = module._AFTER_FAILURE.delay

    class Policy:
        @staticmethod
        def delay(attempt: int, rng: Any) -> float:
            pauses.append(delay(attempt, rng))
            return 0.0

    monkeypatch.setattr(module, "_AFTER_FAILURE", Policy)
    monkeypatch.setattr(module, "_AFTER_TOO_SOON_SECONDS", 0.0)
    return pauses


@pytest.fixture
def make() -> Iterator[Callable[..., Queue]]:
    made: list[Queue] = []

    def make_queue(
        processes: int = 2,
        multiplier: int = 4,
        capacity: Capacity | None = None,
        name: str = "q",
        pulse: Pulse | None = None,
        **options: Any,
    ) -> Queue:
        capacity = capacity or Capacity(processes=lambda: processes, multiplier=lambda: multiplier)
        made.append(Queue(capacity, name, pulse, **options))
        return made[-1]

    yield make_queue
    for queue in made:
        queue.poller.stop()
        queue.port.respond(*[[]] * 10)


@pytest.mark.parametrize(("wait_seconds", "pauses"), [(0, [5.0]), (20, [0.0])])
def test_without_long_polls_an_empty_queue_is_asked_at_the_users_interval(
    make: Callable[..., Queue],
    monkeypatch: pytest.MonkeyPatch,
    wait_seconds: int,
    pauses: list[float],
) -> None:
    queue = make(wait_seconds=wait_seconds, pause_seconds=5.0)
    made: list[float] = []
    monkeypatch.setattr(queue.poller._stopped, "wait", made.append)
    queue.poller.start()
    queue.port.respond([])
    queue.port.wait_for_calls(2)
    assert made == pauses
    queue.port.respond(messages(8))
    eventually(lambda: len(queue.held) == 8)
    assert made == pauses, "what has a backlog is asked at once"


def test_a_worker_asks_for_no_more_than_its_window(make: Callable[..., Queue]) -> None:
    queue = make()
    queue.poller.start()
    assert queue.port.wait_for_calls(1) == [(8, 20)]
    queue.port.respond(messages(8))
    eventually(lambda: len(queue.held) == 8)
    queue.settle(5)
    assert len(queue.port.asked) == 1, "a message waits: it is not worth a call"
    queue.settle(1)
    assert queue.port.wait_for_calls(2)[1] == (6, 20)


@pytest.mark.hazard("H21")
def test_a_fifo_queue_brings_one_message_per_receive(make: Callable[..., Queue]) -> None:
    """SQS holds up the rest of the message's group, so the worker need not."""
    queue = make(name="q.fifo")
    queue.poller.start()
    for call in range(1, 4):
        assert queue.port.wait_for_calls(call) == [(1, 20)] * call
        queue.port.respond(messages(1))
    eventually(lambda: len(queue.held) == 3)


def test_an_empty_response_is_followed_by_the_next_call(make: Callable[..., Queue]) -> None:
    queue = make()
    queue.poller.start()
    queue.port.respond([], [])
    assert queue.port.wait_for_calls(3) == [(8, 20)] * 3


def test_with_a_backlog_and_room_several_calls_are_under_way(make: Callable[..., Queue]) -> None:
    queue = make(multiplier=32)
    queue.poller.start()
    queue.port.respond(*[messages] * 2)
    asked = queue.port.wait_for_calls(4)
    assert asked[:1] == [(10, 20)]
    assert (10, 0) in asked, "the calls beside the long poll do not wait"


def test_without_a_backlog_one_call_is_under_way(make: Callable[..., Queue]) -> None:
    queue = make(multiplier=32)
    queue.poller.start()
    queue.port.respond(messages(3))
    queue.port.wait_for_calls(2)
    assert threading.active_count() < 50
    assert all(wait == 20 for _, wait in queue.port.asked)
    assert len(queue.port.asked) == 2


def test_a_quiet_queue_takes_no_room_from_others(make: Callable[..., Queue]) -> None:
    """kombu's ten connections are held by ten quiet long polls."""
    capacity = Capacity(processes=lambda: 2, multiplier=lambda: 4)
    quiet = [make(capacity=capacity, name=f"quiet{n}") for n in range(20)]
    for queue in quiet:
        queue.poller.start()
    for queue in quiet:
        assert queue.port.wait_for_calls(1) == [(8, 20)]
    busy = make(capacity=capacity, name="busy")
    busy.poller.start()
    busy.port.respond(messages(8))
    eventually(lambda: len(busy.held) == 8)
    busy.settle(8)
    assert busy.port.wait_for_calls(2) == [(8, 20)] * 2


def test_a_queue_is_looked_at_while_a_task_leaves_no_room(
    make: Callable[..., Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task of hours must not keep the worker from seeing that the queue was changed."""
    monkeypatch.setattr(module, "_WAIT_FOR_ROOM_SECONDS", 0.05)
    monkeypatch.setattr(capacity_module, "_LOOK_AGAIN_SECONDS", 0.01)
    queue = make(processes=1, multiplier=1)
    looks: list[int] = []
    queue.poller._before_each = lambda: looks.append(len(queue.port.asked))
    queue.port.respond(messages)
    queue.poller.start()
    eventually(lambda: looks.count(1) >= 2)
    assert len(queue.port.asked) == 1


def test_a_pause_for_a_provider_that_is_down_is_told(
    make: Callable[..., Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the time since the last receive would look like that of a poller that hangs."""
    monkeypatch.setattr(module, "_PAUSED_SECONDS", 0.01)
    queue, told = make(), []
    queue.poller._most = lambda: 0
    queue.poller._events.subscribe(told.append)
    queue.poller.start()
    eventually(lambda: ReceivingPaused(queue="q") in told)
    assert not queue.port.asked


def test_a_pool_that_grows_is_asked_for(make: Callable[..., Queue]) -> None:
    size = [1]
    queue = make(capacity=Capacity(processes=lambda: size[0], multiplier=lambda: 1))
    queue.poller.start()
    queue.port.respond(messages(1))
    eventually(lambda: queue.held)
    size[0] = 4
    assert queue.port.wait_for_calls(2)[1] == (3, 20)


def test_a_message_that_waits_for_its_time_leaves_its_process_to_others(
    make: Callable[..., Queue],
) -> None:
    queue = make(processes=1, multiplier=1)
    queue.poller.start()
    queue.port.respond(messages(1))
    eventually(lambda: queue.held)
    queue.capacity.blocked(queue.held[0])
    assert queue.port.wait_for_calls(2)[1] == (1, 20)
    queue.port.respond(messages(1))
    eventually(lambda: len(queue.held) == 2)
    assert len(queue.port.asked) == 2


def test_nothing_is_asked_for_while_settlements_wait(make: Callable[..., Queue]) -> None:
    behind = ["stuck"]
    capacity = Capacity(
        processes=lambda: 2, multiplier=lambda: 4, is_behind=lambda queue: queue in behind
    )
    queue, other = make(capacity=capacity, name="stuck"), make(capacity=capacity, name="other")
    queue.poller.start()
    other.poller.start()
    other.port.wait_for_calls(1)
    assert queue.port.asked == []
    behind.clear()
    capacity.wake()
    queue.port.wait_for_calls(1)


def test_a_queue_that_is_behind_is_not_woken_in_the_place_of_another(
    make: Callable[..., Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity_module, "_LOOK_AGAIN_SECONDS", 60.0)
    behind: list[str] = []
    capacity = Capacity(
        processes=lambda: 1, multiplier=lambda: 1, is_behind=lambda queue: queue in behind
    )
    capacity.received("runs")
    queue, other = make(capacity=capacity, name="stuck"), make(capacity=capacity, name="other")
    for each, waiting in ((queue, 1), (other, 2)):
        each.poller.start()
        eventually(lambda waiting=waiting: capacity._waiting == waiting)
    behind.append("stuck")
    capacity.freed("runs")
    other.port.wait_for_calls(1)
    assert queue.port.asked == []


def test_failing_receives_are_spaced_and_said_once(
    make: Callable[..., Queue], short_pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    queue = make()
    queue.poller.start()
    queue.port.respond(*[FAILED] * 6, [])
    queue.port.wait_for_calls(8)
    assert len(short_pauses) == 6
    assert all(0.5 <= pause <= 10 for pause in short_pauses)
    assert short_pauses[-1] >= 5
    assert caplog.text.count("receive_failed: queue q: ConnectTimeoutError") == 1
    assert caplog.text.count("receiving_again: queue q, after 6 failure(s)") == 1


@pytest.mark.hazard("0.1")
@pytest.mark.parametrize(
    "error", [RuntimeError("expired"), OSError(), MemoryError(), KeyError(), SystemExit()]
)
def test_no_exception_ends_a_poller(make: Callable[..., Queue], error: BaseException) -> None:
    queue = make()
    queue.poller.start()
    queue.port.respond(error, error, messages(1))
    eventually(lambda: len(queue.held) == 1)


def test_messages_that_cannot_be_taken_give_their_places_back(make: Callable[..., Queue]) -> None:
    queue = make()

    def fail(messages: object) -> None:
        raise LookupError

    queue.take = fail
    queue.poller.start()
    queue.port.respond(messages(8), messages(8))
    assert queue.port.wait_for_calls(3) == [(8, 20)] * 3


def test_a_stopped_poller_asks_no_more_and_hands_over_what_still_comes(
    make: Callable[..., Queue],
) -> None:
    queue = make()
    queue.poller.start()
    queue.port.wait_for_calls(1)
    queue.poller.stop()
    queue.port.respond(messages(2))
    eventually(lambda: len(queue.held) == 2)
    eventually(lambda: queue.poller._main is None)
    assert len(queue.port.asked) == 1


def test_a_poller_that_starts_again_goes_on_with_the_call_under_way(
    make: Callable[..., Queue],
) -> None:
    queue = make()
    queue.poller.start()
    queue.port.wait_for_calls(1)
    queue.poller.stop()
    queue.poller.start()
    queue.port.respond([])
    assert len(queue.port.wait_for_calls(2)) == 2


def test_a_poller_that_has_ended_can_start_again(make: Callable[..., Queue]) -> None:
    queue = make(multiplier=32)
    queue.poller.start()
    queue.port.respond(*[messages] * 4)
    queue.port.wait_for_calls(5)
    queue.poller.stop()
    queue.port.respond(*[[]] * 3)
    eventually(lambda: queue.poller._main is None and not queue.poller._helpers)
    calls = len(queue.port.asked)
    queue.poller.start()
    queue.port.wait_for_calls(calls + 1)


@pytest.mark.parametrize(
    ("seconds", "seconds_ago"),
    [(0.02, 0.0), (20.0, 0.0), (21.0, 0.0), (321.0, 300.0)],
    ids=["at once", "a long poll", "a slow network", "a suspended machine"],
)
def test_a_response_that_was_held_up_is_older_than_it_looks(
    seconds: float, seconds_ago: float
) -> None:
    """The messages' visibility timeout has begun when SQS responded, not when we looked."""
    port, taken, clock = Port(), [], iter([1_000.0, 1_000.0 + seconds])
    capacity = Capacity(processes=lambda: 1, multiplier=lambda: 1)
    assert capacity.wait_for_room("q", lambda: False) == 1
    poller = Poller(
        "q",
        calls=port,  # type: ignore[arg-type]
        capacity=capacity,
        take=lambda messages, ago, hidden: taken.append(ago),
        clock=lambda: next(clock),
    )
    port.respond(messages(1))
    poller._receive(1, wait_seconds=20, name="q")
    assert taken == [pytest.approx(seconds_ago)]


@pytest.fixture
def pulse() -> tuple[Pulse, list[float]]:
    """A pulse, and the time that it goes by."""
    now = [0.0]
    return Pulse(clock=lambda: now[0]), now


@pytest.mark.parametrize("thread", ["main", "helper"])
def test_a_poller_that_hangs_beside_its_calls_is_noticed_within_30_seconds(
    make: Callable[..., Queue], pulse: tuple[Pulse, list[float]], thread: str
) -> None:
    queue = make(processes=100, pulse=pulse[0])
    hangs, go_on = threading.Event(), threading.Event()

    def hang(messages: object) -> None:
        hangs.set()
        go_on.wait(20)

    if thread == "main":
        queue.take = hang
    queue.poller.start()
    if thread == "helper":
        queue.port.respond(messages(10))
        queue.port.wait_for_calls(3)
        queue.take = hang
        queue.port.respond([])  # whose it is does not matter: the other one takes the next
    queue.port.respond(messages(10))
    assert hangs.wait(10)
    pulse[1][0] += 25
    try:
        assert any("the poller of q" in fault for fault in pulse[0].faults())
    finally:
        go_on.set()


def test_a_long_poll_that_lasts_is_no_fault(
    make: Callable[..., Queue], pulse: tuple[Pulse, list[float]]
) -> None:
    """Nobody answers: it ends with the client's timeouts, 35 seconds at the most."""
    queue = make(pulse=pulse[0])
    queue.poller.start()
    queue.port.wait_for_calls(1)
    pulse[1][0] += 36
    assert pulse[0].faults() == []
    pulse[1][0] += 60
    [found] = pulse[0].faults()
    assert found == "the poller of q has not turned for 96 s"


def test_a_backlog_is_received_by_one_thread_where_no_other_is_left(
    monkeypatch: pytest.MonkeyPatch, short_pauses: list[float]
) -> None:
    queue = Queue(Capacity(processes=lambda: 100, multiplier=lambda: 4))
    queue.poller.start()

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", start)
        queue.port.respond(messages)
        queue.port.respond(messages)
        queue.port.wait_for_calls(3)
    queue.poller.stop()
    queue.port.respond([])
    assert len(queue.held) == 20
    assert short_pauses == []
