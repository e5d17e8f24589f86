"""A thread of the keeper that dies in a call is a fault; a call that fails is none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from celery_sqs_backoff.observe import health
from celery_sqs_backoff.sqs.calls import Calls
from celery_sqs_backoff.sqs.delivery import Delivery
from celery_sqs_backoff.sqs.queues import Queue
from celery_sqs_backoff.worker import relay
from celery_sqs_backoff.worker.keeper import Keeper
from celery_sqs_backoff.worker.lease import Lease
from tests.support.processes import eventually

QUEUE = Queue("https://sqs/1/q", visibility_timeout_seconds=3)


class Client:
    """Every call ends as the test says."""

    def __init__(self, end: BaseException) -> None:
        self.end = end
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        def call(**_: Any) -> Any:
            self.calls += 1
            raise self.end

        return call


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    made = Keeper(linger_seconds=0)
    made.start()
    yield made
    made.stop(0.1)


def hold(keeper: Keeper, client: Client) -> Lease:
    lease = Lease(
        calls=Calls(client, QUEUE.url),  # type: ignore[arg-type]
        queue=QUEUE,
        message={"ReceiptHandle": "h"},
        body="{}",
        delivery=Delivery("m", QUEUE.url, 0.0),
        received_at=keeper.clock(),
        keeper=keeper,
        free=lambda: None,
    )
    keeper.hold(lease)
    return lease


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("settle", ["renew", "hide", "delete"])
def test_a_thread_that_dies_in_a_call_is_noticed(keeper: Keeper, settle: str) -> None:
    client = Client(SystemExit())
    lease = hold(keeper, client)
    assert keeper.pulse.faults() == []
    if settle == "hide":
        lease.defer(60)
    elif settle == "delete":
        lease.done()
    found = eventually(keeper.pulse.faults, timeout=20)
    assert found == ["a thread of the keeper has died in a call to SQS"]
    assert client.calls == 1
    client.end = OSError("another thread's call, as the keeper stops")


def test_a_call_that_fails_is_no_fault(keeper: Keeper) -> None:
    client = Client(OSError("SQS is away"))
    hold(keeper, client).done()
    eventually(lambda: client.calls >= 1, timeout=20)
    assert keeper.pulse.faults() == []


def test_a_call_that_never_returns_is_noticed(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "_LONGEST_JOB_SECONDS", -1.0)
    faults: list[list[str]] = []

    class Hanging(Client):
        def __getattr__(self, name: str) -> Any:
            def call(**_: Any) -> Any:
                faults.append(keeper.pulse.faults())
                raise OSError

            return call

    hold(keeper, Hanging(OSError())).done()
    [found] = eventually(lambda: faults[:1], timeout=20)
    assert "a call to SQS has not returned for" in found[0]


def test_a_thread_that_hangs_when_its_call_has_returned_is_noticed(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert relay._LONGEST_REST_SECONDS + health.MAX_AGE_SECONDS + health.INTERVAL_SECONDS < 60
    monkeypatch.setattr(relay, "_LONGEST_REST_SECONDS", -1.0)
    faults: list[list[str]] = []
    keeper.events.subscribe(lambda event: faults.append(keeper.pulse.faults()))
    hold(keeper, Client(OSError())).done()
    [found] = eventually(lambda: faults[:1], timeout=20)
    assert "a thread of the keeper has not turned for" in found[0]


def test_a_lock_that_is_never_released_does_not_hold_up_the_heartbeat(keeper: Keeper) -> None:
    with keeper._lock:
        asker = threading.Thread(target=keeper.pulse.faults, daemon=True)
        asker.start()
        asker.join(10)
        assert not asker.is_alive()


def test_without_threads_the_keeper_is_dead(keeper: Keeper) -> None:
    keeper._relay._threads.clear()
    assert keeper.pulse.faults() == ["the keeper has died"]
