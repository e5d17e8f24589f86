"""From a received message to a lease: which messages get one, and where each goes."""

from __future__ import annotations

import itertools
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ReadTimeoutError

from celery_sqs_backoff.sqs.calls import Calls
from celery_sqs_backoff.worker.capacity import Capacity
from celery_sqs_backoff.worker.foreign import Foreign
from celery_sqs_backoff.worker.keeper import Keeper
from celery_sqs_backoff.worker.lease import State
from celery_sqs_backoff.worker.messages import Receiver
from tests.rig.inside.test_payload import ENVELOPE

ARN = "arn:aws:sqs:us-east-1:1:"


class Sqs:
    """A queue's attributes."""

    def __init__(self) -> None:
        self.attributes: dict[str, str] = {"VisibilityTimeout": "30"}
        self.reads = 0

    def get_queue_attributes(self, **_: Any) -> Any:
        self.reads += 1
        return {"Attributes": self.attributes}


class Worker:
    """A receiver, and where its messages went."""

    def __init__(self, name: str = "q") -> None:
        self.name, self.url = name, f"https://sqs.example/1/{name}"
        self.now = 1_000.0
        self.sqs = Sqs()
        self.keeper = Keeper(clock=lambda: self.now)
        self.capacity = Capacity(processes=lambda: 2, multiplier=lambda: 4)
        self._handles = itertools.count()
        clients: Any = SimpleNamespace(
            settling=lambda url: Calls(self.sqs, url),  # type: ignore[arg-type]
            settling_client=lambda url: self.sqs,
        )
        self.receiver = Receiver(
            self.keeper,
            clients=clients,
            capacity=self.capacity,
            foreign=Foreign({}, is_registered=lambda name: True, origin="o"),
        )
        self.arrived: list[Any] = []
        self.kept: list[str] = []
        self.receiver.deliver = self.arrived.append
        self.receiver.keep = lambda lease, headers, what: self.kept.append(what)

    def message(self, task: str = "t", **facts: Any) -> dict[str, Any]:
        n = next(self._handles)
        body = json.dumps(ENVELOPE | {"headers": {"task": task, "id": "i"}})
        return {
            "MessageId": f"m{n}",
            "ReceiptHandle": f"h{n}",
            "Body": body,
            "Attributes": {"MessageGroupId": "g"},
        } | facts

    def take(self, *messages: dict[str, Any]) -> None:
        self.receiver.take(self.name, self.url, list(messages))


def test_a_task_of_ours_arrives_under_a_lease() -> None:
    worker = Worker()
    worker.take(worker.message())
    [arrival] = worker.arrived
    assert arrival.lease.state is State.HELD
    assert worker.keeper.held() == [arrival.lease]
    assert worker.capacity.held == 1
    message = SimpleNamespace(delivery_tag="h0")
    assert worker.receiver.lease(message) is message.sqs_lease is arrival.lease
    info = arrival.payload["properties"]["delivery_info"]
    assert "Body" not in info["sqs_message"]
    json.dumps(arrival.payload)


def test_a_dead_letter_queue_that_is_attached_while_a_task_runs_gets_its_dead_letter() -> None:
    worker = Worker()
    worker.take(worker.message())
    [arrival] = worker.arrived
    worker.sqs.attributes["RedrivePolicy"] = json.dumps(
        {"deadLetterTargetArn": ARN + "dlq", "maxReceiveCount": 5}
    )
    worker.now += 60
    worker.receiver.read_queue(worker.url)
    assert arrival.lease.queue.dlq_arn == ARN + "dlq"


def test_a_settled_message_gives_its_place_back() -> None:
    worker = Worker()
    worker.take(worker.message())
    worker.arrived[0].lease.done()
    assert worker.capacity.held == 0
    assert worker.receiver.lease_of("h0") is None


def test_something_that_only_looks_like_a_lease_is_none() -> None:
    worker = Worker()
    message = SimpleNamespace(delivery_tag="h0", sqs_lease=object())
    assert worker.receiver.lease(message) is None


@pytest.mark.parametrize("body", ["hello", json.dumps(ENVELOPE | {"headers": [1]})])
def test_a_message_that_is_no_task_is_kept(body: str) -> None:
    worker = Worker()
    worker.take(worker.message(Body=body), worker.message())
    assert len(worker.kept) == 1
    assert len(worker.arrived) == 1


def test_one_message_that_cannot_be_taken_does_not_hold_up_the_others() -> None:
    worker = Worker()
    worker.take(worker.message(Attributes={"SentTimestamp": "?"}), worker.message())
    assert len(worker.arrived) == 1


def test_a_message_that_cannot_be_sent_on_is_neither_held_nor_counted() -> None:
    worker = Worker()

    def fail(arrival: Any) -> None:
        raise RuntimeError("the event loop has ended")

    worker.receiver.deliver = fail
    worker.take(worker.message())
    assert worker.keeper.held() == []
    assert worker.capacity.held == 0
    assert worker.receiver.lease_of("h0") is None


def test_what_comes_while_the_worker_stops_is_given_back() -> None:
    worker = Worker()
    worker.receiver.close()
    worker.take(worker.message(), worker.message())
    assert worker.arrived == []
    assert worker.keeper.held() == []
    assert worker.keeper.waiting == 2


def test_a_worker_that_stops_brings_nothing_forward_and_does_not_ask_its_pool() -> None:
    worker = Worker()
    assert worker.receiver._room() > 0
    worker.capacity._processes = lambda: int("the pool has gone")
    worker.receiver.close()
    assert worker.receiver._room() == 0


def test_a_message_that_is_held_already_is_not_run_twice() -> None:
    worker = Worker()
    worker.take(worker.message())
    worker.take(worker.message(MessageId="m0"))
    [arrival] = worker.arrived
    assert arrival.lease.state is State.HELD
    assert worker.capacity.held == 1


def test_attributes_that_are_long_in_coming_do_not_hold_up_each_poll() -> None:
    worker = Worker()

    def hangs(**_: Any) -> Any:
        worker.sqs.reads += 1
        worker.now += 10
        raise ReadTimeoutError(endpoint_url="x")

    worker.sqs.get_queue_attributes = hangs  # type: ignore[method-assign]
    for _ in range(3):
        worker.receiver.read_queue(worker.url)
        worker.now += 0.5
    assert worker.sqs.reads == 1


def test_a_dead_letter_queue_that_is_attached_while_the_worker_runs_is_seen() -> None:
    worker = Worker()
    assert worker.receiver.read_queue(worker.url).dlq_url is None
    policy = {"deadLetterTargetArn": f"{ARN}dlq", "maxReceiveCount": 5}
    worker.sqs.attributes["RedrivePolicy"] = json.dumps(policy)
    worker.now += 59
    assert worker.receiver.read_queue(worker.url).dlq_url is None
    worker.now += 2
    assert worker.receiver.read_queue(worker.url).dlq_url == "https://sqs.example/1/dlq"
    assert worker.sqs.reads == 2


def test_how_many_messages_are_in_flight_is_read_once_a_minute() -> None:
    """Messages that the worker has got already are settled by the newest figure."""
    worker = Worker()
    worker.take(worker.message())
    worker.sqs.attributes["ApproximateNumberOfMessagesNotVisible"] = "96000"
    for _ in range(6):
        worker.now += 12
        worker.receiver.read_queue(worker.url)
    assert worker.sqs.reads == 2
    assert worker.arrived[0].lease.queue.messages_in_flight == 96_000
    worker.sqs.get_queue_attributes = lambda **_: {}  # type: ignore[method-assign]
    worker.now += 60
    assert worker.receiver.read_queue(worker.url).messages_in_flight == 0, "an old figure is none"


def test_a_response_that_was_held_up_leaves_less_of_the_visibility_timeout() -> None:
    """A suspended machine: what is left must not be asked of SQS as if it were whole."""
    worker = Worker()
    worker.receiver.take(worker.name, worker.url, [worker.message()], seconds_ago=300.0)
    lease = worker.arrived[0].lease
    assert lease.visible_at == 1_000.0 - 300.0 + 30
    assert time.time() - lease.delivery.received_at == pytest.approx(300, abs=5)


def test_a_slow_adapter_does_not_make_later_messages_of_its_batch_look_newer() -> None:
    worker = Worker()
    read = worker.receiver._read

    def read_slowly(name: str, message: dict[str, Any]) -> Any:
        worker.now += 20
        return read(name, message)

    worker.receiver._read = read_slowly  # type: ignore[method-assign]
    worker.take(worker.message(), worker.message())
    assert [a.lease.received_at for a in worker.arrived] == [1_000.0, 1_000.0]
    assert [a.lease.visible_at for a in worker.arrived] == [1_030.0, 1_030.0]
