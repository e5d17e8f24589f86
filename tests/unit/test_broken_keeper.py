"""A keeper whose thread has died is a fault; a call that fails is none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from celery_sqs_backoff.sqs.calls import Calls
from celery_sqs_backoff.sqs.delivery import Delivery
from celery_sqs_backoff.sqs.queues import Queue
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
def test_a_thread_that_has_died_is_noticed(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    def die() -> None:
        raise SystemExit

    monkeypatch.setattr(keeper._relay, "_next_job", die)
    hold(keeper, Client(OSError())).done()
    assert eventually(keeper.pulse.faults, timeout=20) == ["the keeper has died"]


@pytest.mark.parametrize("settle", ["renew", "hide", "delete"])
def test_a_call_that_ends_its_thread_is_made_again(keeper: Keeper, settle: str) -> None:
    """A library may call ``sys.exit()``; the message must not stay under way for good."""
    client = Client(SystemExit())
    lease = hold(keeper, client)
    if settle == "hide":
        lease.defer(60)
    elif settle == "delete":
        lease.done()
    eventually(lambda: client.calls >= 2, timeout=20)
    assert keeper.pulse.faults() == []


def test_a_call_that_fails_is_no_fault(keeper: Keeper) -> None:
    client = Client(OSError("SQS is away"))
    hold(keeper, client).done()
    eventually(lambda: client.calls >= 1, timeout=20)
    assert keeper.pulse.faults() == []


def test_a_lock_that_is_never_released_does_not_hold_up_the_heartbeat(keeper: Keeper) -> None:
    with keeper._lock:
        asker = threading.Thread(target=keeper.pulse.faults, daemon=True)
        asker.start()
        asker.join(10)
        assert not asker.is_alive()
