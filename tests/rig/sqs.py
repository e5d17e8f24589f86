"""The SQS of the rig: the strict fake, which records each call, and a kombu transport to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty
from typing import Any

from kombu.transport import virtual
from kombu.utils.json import dumps

from ..support.fake_sqs import FakeSQS, Fault, _error

URL = "https://sqs.example/1/"


@dataclass(frozen=True)
class Call:
    """One request to SQS.

    Arguments:
        at: when SQS got the request, in seconds since the epoch.
        action: the name of the call in SQS's API, such as "DeleteMessageBatch".
        arguments: the arguments of boto3's method.
        answer: the response of SQS, or None if the call raised an error.
    """

    at: float
    action: str
    arguments: dict[str, Any]
    answer: Any


def _recorded(action: str, made: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: RecordingSQS, **arguments: Any) -> Any:
        answer = None
        self._asked = arguments["QueueUrl"]
        try:
            answer = made(self, **arguments)
            return answer
        finally:
            self.calls.append(Call(self.clock(), action, arguments, answer))
            self.on_call(action)
            self._be_under_way(action)

    return call


class RecordingSQS(FakeSQS):
    """The strict fake SQS. ``calls`` has each request, in order."""

    def __init__(self, clock: Callable[[], float], *, max_in_flight: int = 120_000) -> None:
        super().__init__(clock, max_in_flight=max_in_flight)
        self.clock = clock
        self.max_in_flight = max_in_flight
        self.calls: list[Call] = []
        #: Called after each call, with the action.
        self.on_call: Callable[[str], None] = lambda action: None
        #: Functions to call while the next calls of an action are under way.
        self.under_way: list[tuple[str, Callable[[], object]]] = []
        self._lasting: list[tuple[float, Fault, str | None]] = []
        self._asked = ""

    def fail_until(self, at: float, fault: Fault, queue: str | None = None) -> None:
        """Let each call of the fault's action fail until a time. "*" means all but SendMessage."""
        self._lasting.append((at, fault, queue))

    def _be_under_way(self, action: str) -> None:
        due = next((each for each in self.under_way if each[0] == action), None)
        if due is not None:
            self.under_way.remove(due)
            due[1]()

    def heal(self) -> None:
        """End all faults."""
        self.faults.clear()
        self._lasting.clear()

    def send_message(self, **arguments: Any) -> Any:
        if (fault := self._take_fault("SendMessage")) is not None:
            raise _error(fault.error or "", "SendMessage")
        return FakeSQS.send_message(self, **arguments)

    def _take_fault(self, action: str) -> Fault | None:
        for until, fault, queue in self._lasting:
            is_meant = fault.action == action or (fault.action == "*" and action != "SendMessage")
            if self.clock() < until and is_meant and queue in (None, self._asked):
                return fault
        return super()._take_fault(action)

    def next_visible_at(self, url: str) -> float:
        """Return when a receive would next get a message. For an empty queue, return infinity."""
        queue, now = self.queues[url], self.clock()
        if any(True for _ in queue._available(now)):
            return now
        return min((m.visible_at for m in queue.messages if m.visible_at > now), default=math.inf)

    receive_message = _recorded("ReceiveMessage", FakeSQS.receive_message)
    send_message = _recorded("SendMessage", send_message)
    send_message_batch = _recorded("SendMessageBatch", FakeSQS.send_message_batch)
    delete_message_batch = _recorded("DeleteMessageBatch", FakeSQS.delete_message_batch)
    change_message_visibility_batch = _recorded(
        "ChangeMessageVisibilityBatch", FakeSQS.change_message_visibility_batch
    )
    get_queue_attributes = _recorded("GetQueueAttributes", FakeSQS.get_queue_attributes)


def transport_to(sqs: RecordingSQS) -> type[virtual.Transport]:
    """Return a kombu transport whose queues are those of ``sqs``."""

    class Channel(virtual.Channel):
        """Publishes and acknowledges as kombu's SQS channel does. It receives nothing."""

        @property
        def transport_options(self) -> Any:
            return self.connection.client.transport_options

        def _resolve_queue_url(self, name: str) -> str:
            return URL + str(self.transport_options.get("queue_name_prefix", "")) + name

        def _has_queue(self, queue: str, **_: Any) -> bool:
            return self._resolve_queue_url(queue) in sqs.queues

        def _new_queue(self, queue: str, **_: Any) -> None:
            """Do nothing, because the rig makes all queues."""

        def _size(self, queue: str) -> int:
            return 0

        def _get(self, queue: str, timeout: float | None = None) -> Any:
            raise Empty

        def _put(self, queue: str, message: dict[str, Any], **_: Any) -> None:
            properties = message["properties"]
            options = {
                name: properties[name]
                for name in ("DelaySeconds", "MessageGroupId", "MessageDeduplicationId")
                if name in properties
            }
            url = self._resolve_queue_url(queue)
            sqs.send_message(QueueUrl=url, MessageBody=dumps(message), **options)

        def basic_ack(self, delivery_tag: str, multiple: bool = False) -> None:
            self._settle(delivery_tag, "delete_message_batch", {})

        def basic_reject(self, delivery_tag: str, requeue: bool = False) -> None:
            if requeue:
                hide = {"VisibilityTimeout": 0}
                self._settle(delivery_tag, "change_message_visibility_batch", hide)
            else:
                self._settle(delivery_tag, "delete_message_batch", {})

        def _settle(self, tag: str, method: str, more: dict[str, Any]) -> None:
            message = self.qos.get(tag)
            url = message.delivery_info["sqs_queue"]
            entry = {"Id": "0", "ReceiptHandle": tag, **more}
            getattr(sqs, method)(QueueUrl=url, Entries=[entry])
            self.qos.ack(tag)

    class Transport(virtual.Transport):
        driver_type = driver_name = "sqs"
        polling_interval = None
        state = virtual.BrokerState()

        def driver_version(self) -> str:
            return "rig"

    Transport.Channel = Channel
    return Transport
