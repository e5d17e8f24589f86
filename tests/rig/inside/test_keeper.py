"""The keeper, which makes the calls that renew and settle messages: its threads and its lock."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_sqs_backoff import threads
from celery_sqs_backoff.sqs.calls import Calls
from celery_sqs_backoff.sqs.delivery import Delivery
from celery_sqs_backoff.sqs.queues import Queue
from celery_sqs_backoff.worker.keeper import Keeper
from celery_sqs_backoff.worker.lease import Lease, State
from tests.support.processes import eventually

QUEUE = Queue("https://sqs.example/1/q", visibility_timeout_seconds=30)


class Client:
    """An SQS client that counts calls. ``end`` may raise, or return the code of failed entries."""

    def __init__(self, end: Callable[[str], str | None] = lambda name: None) -> None:
        self.end = end
        self.calls: list[str] = []
        self.entries = 0

    def __getattr__(self, name: str) -> Any:
        def call(Entries: list[dict[str, Any]], **_: Any) -> Any:  # noqa: N803
            self.calls.append(name)
            code = self.end(name)
            self.entries += 0 if code else len(Entries)
            listed = [{"Id": e["Id"], "MessageId": "m", "Code": code} for e in Entries]
            return {"Failed" if code else "Successful": listed}

        return call


def raises(exc: BaseException) -> Callable[[str], str | None]:
    def end(name: str) -> str | None:
        raise exc

    return end


def has_no_thread_left(*_: object) -> None:
    raise RuntimeError("can't start new thread")


_NUMBERS = itertools.count()


def hold(
    keeper: Keeper, client: Client, *, queue: Queue = QUEUE, message_id: str = "", age: float = 0
) -> Lease:
    number = next(_NUMBERS)
    message_id = message_id or f"m{number}"
    lease = Lease(
        calls=Calls(client, queue.url),  # type: ignore[arg-type]
        queue=queue,
        message={"ReceiptHandle": f"h{number}"},
        body="{}",
        delivery=Delivery(message_id, queue.url, 0.0),
        received_at=keeper.clock() - age,
        keeper=keeper,
        free=lambda: None,
    )
    keeper.hold(lease)
    return lease


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    made = Keeper(linger_seconds=0)
    made.start()
    yield made
    made.stop(0.1)


# Threads


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_dead_thread(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heartbeat reports a fault if the keeper's thread has died."""

    def die() -> None:
        raise SystemExit

    monkeypatch.setattr(keeper, "next_call", die)
    hold(keeper, Client()).done()
    assert eventually(keeper.pulse.faults, timeout=20) == ["the keeper has died"]


@pytest.mark.parametrize("settle", ["renew", "hide", "delete"])
@pytest.mark.parametrize("exc", [SystemExit(), OSError("SQS is away")], ids=repr)
def test_call_ends_its_thread(keeper: Keeper, settle: str, exc: BaseException) -> None:
    """The keeper repeats a call that fails, even if a library in it calls ``sys.exit()``.

    The heartbeat reports no fault.
    """
    client = Client(raises(exc))
    queue = Queue("https://sqs/1/q", visibility_timeout_seconds=3)
    lease = hold(keeper, client, queue=queue)
    if settle == "hide":
        lease.defer(60)
    elif settle == "delete":
        lease.done()
    eventually(lambda: len(client.calls) >= 2, timeout=20)
    assert keeper.pulse.faults() == []
    client.end = lambda name: None  # otherwise the keeper's thread would fail during later tests


def test_lock_held(keeper: Keeper) -> None:
    """The heartbeat does not wait for the keeper's lock, which may never be released."""
    with keeper.lock:
        asker = threading.Thread(target=keeper.pulse.faults, daemon=True)
        asker.start()
        asker.join(10)
        assert not asker.is_alive()


def test_hanging_queue(keeper: Keeper) -> None:
    """If calls about a queue hang, the keeper still renews messages of other queues.

    Only one call about visibility is under way for the queue that hangs.
    """
    release, renewed = threading.Event(), threading.Event()

    def hang(name: str) -> None:
        release.wait(20)

    def note(name: str) -> None:
        renewed.set()

    hung, well = Queue("https://sqs/1/hung"), Queue("https://sqs/1/well")
    slow = Client(hang)
    try:
        for _ in range(50):
            hold(keeper, slow, queue=hung, age=11)
            hold(keeper, slow, queue=hung).done()
        hold(keeper, Client(note), queue=well, age=11)
        assert renewed.wait(5)
        eventually(lambda: "change_message_visibility_batch" in slow.calls)
        assert slow.calls.count("change_message_visibility_batch") == 1
    finally:
        release.set()
        keeper.stop(timeout_seconds=10)
    assert keeper.waiting == 0


def test_no_thread_left(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper settles messages even if it cannot start a thread."""
    client = Client()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", has_no_thread_left)
        patch.setattr(threads, "_idle", deque())
        for count in (1, 2, 3):
            hold(keeper, client).done()
            eventually(lambda count=count: client.entries == count)
    hold(keeper, client).done()
    keeper.stop(5)
    assert (keeper.waiting, client.entries) == (0, 4)


def test_stopped_without_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper whose thread could not be started can be stopped."""
    keeper = Keeper()
    monkeypatch.setattr(threading.Thread, "start", has_no_thread_left)
    with pytest.raises(RuntimeError):
        keeper.start()
    keeper.stop(0.1)


def test_stop(keeper: Keeper) -> None:
    """A keeper that stops gives the messages back that it still holds."""
    client = Client()
    lease = hold(keeper, client)
    keeper.stop(10)
    assert lease.state is State.GIVE_BACK
    assert client.calls == ["change_message_visibility_batch"]


def test_waiting_for() -> None:
    """The keeper counts for each queue the settlements that SQS has not confirmed."""
    keeper, client = Keeper(), Client()
    stuck, well = Queue("https://sqs/1/stuck"), Queue("https://sqs/1/well")
    for _ in range(11):
        hold(keeper, client, queue=stuck).done()
    hold(keeper, client, queue=well).done()
    assert (keeper.waiting_for(stuck.url), keeper.waiting_for(well.url)) == (11, 1)
    turn(keeper)
    assert (keeper.waiting_for(stuck.url), keeper.waiting_for(well.url)) == (1, 1)  # a batch of ten


# A lost message that is received again while its run ends


def turn(keeper: Keeper) -> None:
    while call := keeper.next_call():
        keeper.perform(call)


def receive_while_told(keeper: Keeper, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the message be received again while observers get the event that it is lost."""

    def receive_again(*_: object, **__: object) -> None:
        client.end = lambda name: None
        hold(keeper, client, message_id="m")

    monkeypatch.setattr("celery_sqs_backoff.observe.log_lines.logger.log", receive_again)


@pytest.mark.parametrize("runs", [True, False])
def test_received_during_loss_notice(monkeypatch: pytest.MonkeyPatch, runs: bool) -> None:
    """If a message is received again while the keeper reports its loss, the keeper renews it.

    If its task is running, the run keeps its lease. Otherwise the message gets a new lease.
    """
    now, client = [1_000.0], Client(lambda name: "ReceiptHandleIsInvalid")
    keeper, freed = Keeper(clock=lambda: now[0]), list[int]()
    lease = hold(keeper, client, message_id="m")
    lease.handed_to_pool, lease.free = lambda: runs, lambda: freed.append(1)
    receive_while_told(keeper, client, monkeypatch)
    for _ in range(2):
        now[0] += 11
        turn(keeper)
    [held] = keeper.held()
    assert ((held is lease), bool(freed)) == (runs, not runs)
    assert (len(client.calls), client.entries) == (2, 1)
