"""A strict SQS in memory, with a clock that the test sets.

It enforces rules that no local server enforces:

- the limit of twelve hours after a receive
- the quota of messages in flight
- the limit of ten message attributes
- the rules of stale receipt handles, of retention and of FIFO queues

It follows the documentation of AWS or recorded responses of AWS. ``tests/unit/test_fake_sqs.py``
names the source of each rule. The fake has no long polls that wait, no policies, no KMS and no
message move tasks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

from .fake_sqs_queue import MAX_BYTES, Message, Queue, Refused, message_bytes, system_attributes

_ENTRY_ID = re.compile(r"[A-Za-z0-9_-]{1,80}")
_BATCH_ERROR = "AWS.SimpleQueueService."


class Clock:
    """A clock that the test sets, in seconds since the epoch."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def time(self) -> float:
        return self.now

    __call__ = time


@dataclass(frozen=True)
class Fault:
    """Makes the next call of ``action`` fail.

    Arguments:
        action: the name of the call in SQS's API, such as "DeleteMessageBatch".
        error: an exception to raise, or the code of a ``ClientError``. With None, the response
            is empty, as a proxy could make it.
        after: whether SQS carries out the call, so that only the response is lost.
        entries: the positions of entries in a batch that fail. SQS does not carry them out. With
            None, the whole call fails.
    """

    action: str
    error: str | Exception | None
    after: bool = False
    entries: frozenset[int] | None = None


@dataclass(frozen=True)
class Change:
    """A change of visibility that SQS has accepted. ``worked`` says whether it had an effect."""

    at: float
    message: Message
    handle: str
    seconds: int
    worked: bool


class FakeSQS:
    """A client like boto3's, with the methods that this package calls, and the SQS behind it.

    Arguments:
        clock: the clock of all queues.
        max_in_flight: how many messages of a queue may be in flight.
    """

    def __init__(self, clock: Callable[[], float], *, max_in_flight: int = 120_000) -> None:
        self._clock = clock
        self._max_in_flight = max_in_flight
        self.queues: dict[str, Queue] = {}
        self.changes: list[Change] = []
        self.faults: list[Fault] = []
        #: The reasons why SQS has refused entries of batches.
        self.refusals: list[str] = []
        #: Called at each batch call before SQS carries it out, with the action and the bodies of
        #: the messages.
        self.during_call: Callable[[str, list[str]], None] = lambda action, bodies: None
        #: Called with each fault, and the bodies of the messages that it affects.
        self.on_fault: Callable[[Fault, list[str]], None] = lambda fault, bodies: None

    def create_queue(self, *, QueueName: str, Attributes: dict[str, str] | None = None) -> Any:  # noqa: N803
        url = f"https://sqs.example/1/{QueueName}"
        with _as_client_error("CreateQueue"):
            self.queues[url] = Queue(
                url, Attributes or {}, self._clock, self._by_arn, self._max_in_flight
            )
        return {"QueueUrl": url}

    def set_queue_attributes(self, *, QueueUrl: str, Attributes: dict[str, str]) -> None:  # noqa: N803
        queue = self._queue(QueueUrl, "SetQueueAttributes")
        with _as_client_error("SetQueueAttributes"):
            queue.set_attributes(Attributes)

    def get_queue_attributes(self, *, QueueUrl: str, AttributeNames: Sequence[str]) -> Any:  # noqa: N803
        queue = self._queue(QueueUrl, "GetQueueAttributes")
        fault = self._take_fault("GetQueueAttributes")
        if fault is not None and fault.error is not None:
            raise _error(fault.error, "GetQueueAttributes")
        known = {"VisibilityTimeout": "30", "MessageRetentionPeriod": "345600"}
        known |= {"QueueArn": queue.arn, **queue.attributes}
        known |= {name: str(count) for name, count in queue.counts().items()}
        return {"Attributes": {k: v for k, v in known.items() if {k, "All"} & set(AttributeNames)}}

    def send_message(self, *, QueueUrl: str, **message: Any) -> Any:  # noqa: N803
        queue = self._queue(QueueUrl, "SendMessage")
        with _as_client_error("SendMessage"):
            return {"MessageId": _send(queue, message).id}

    def receive_message(
        self,
        *,
        QueueUrl: str,  # noqa: N803
        MaxNumberOfMessages: int = 1,  # noqa: N803
        WaitTimeSeconds: int = 0,  # noqa: N803
        VisibilityTimeout: int | None = None,  # noqa: N803
        MessageSystemAttributeNames: Sequence[str] = (),  # noqa: N803
        MessageAttributeNames: Sequence[str] = (),  # noqa: N803
    ) -> Any:
        """Receive without waiting. As with SQS, a response without messages has no ``Messages``."""
        queue = self._queue(QueueUrl, "ReceiveMessage")
        fault = self._take_fault("ReceiveMessage")
        if fault is not None and not fault.after:
            return _answered(fault, "ReceiveMessage")
        with _as_client_error("ReceiveMessage"):
            if not (1 <= MaxNumberOfMessages <= 10 and 0 <= WaitTimeSeconds <= 20):
                raise Refused("InvalidParameterValue", "1 to 10 messages, 0 to 20 s")
            if VisibilityTimeout is not None and not 0 <= VisibilityTimeout <= 43_200:
                raise Refused("InvalidParameterValue", "VisibilityTimeout: 0 to 43200")
            received = queue.receive(
                MaxNumberOfMessages,
                visibility_timeout=VisibilityTimeout,
                waits=WaitTimeSeconds > 0,
            )
        if fault is not None:
            self.on_fault(fault, [message.body for _, message in received])
            return _answered(fault, "ReceiveMessage")
        messages = [
            {
                "MessageId": message.id,
                "ReceiptHandle": handle,
                "Body": message.body,
                "Attributes": system_attributes(message, MessageSystemAttributeNames),
                "MessageAttributes": {
                    name: dict(value)
                    for name, value in message.attributes.items()
                    if {name, "All"} & set(MessageAttributeNames)
                },
            }
            for handle, message in received
        ]
        return {"Messages": messages} if messages else {}

    def send_message_batch(self, *, QueueUrl: str, Entries: list[dict[str, Any]]) -> Any:  # noqa: N803
        queue = self._queue(QueueUrl, "SendMessageBatch")
        total = sum(
            message_bytes(e["MessageBody"], e.get("MessageAttributes", {})) for e in Entries
        )

        def send(entry: dict[str, Any]) -> dict[str, str]:
            return {"MessageId": _send(queue, entry).id}

        def body(entry: dict[str, Any]) -> str:
            return str(entry["MessageBody"])

        too_long = total > MAX_BYTES
        return self._batch("SendMessageBatch", Entries, send, body, too_long=too_long)

    def delete_message_batch(self, *, QueueUrl: str, Entries: list[dict[str, Any]]) -> Any:  # noqa: N803
        queue = self._queue(QueueUrl, "DeleteMessageBatch")

        def delete(entry: dict[str, Any]) -> dict[str, str]:
            queue.delete(entry["ReceiptHandle"])
            return {}

        return self._batch("DeleteMessageBatch", Entries, delete, _body_by_handle(queue))

    def change_message_visibility_batch(
        self,
        *,
        QueueUrl: str,  # noqa: N803
        Entries: list[dict[str, Any]],  # noqa: N803
    ) -> Any:
        queue = self._queue(QueueUrl, "ChangeMessageVisibilityBatch")

        def change(entry: dict[str, Any]) -> dict[str, str]:
            handle, seconds = entry["ReceiptHandle"], entry["VisibilityTimeout"]
            worked = queue.change_visibility(handle, seconds)
            message = queue.message_of(handle)
            self.changes.append(Change(self._clock(), message, handle, seconds, worked))
            return {}

        return self._batch("ChangeMessageVisibilityBatch", Entries, change, _body_by_handle(queue))

    def _batch(
        self,
        action: str,
        entries: list[dict[str, Any]],
        perform: Callable[[dict[str, Any]], dict[str, str]],
        body: Callable[[dict[str, Any]], str],
        *,
        too_long: bool = False,
    ) -> Any:
        ids = [entry["Id"] for entry in entries]
        with _as_client_error(action):
            _check_batch(ids, too_long=too_long)
        bodies = [body(entry) for entry in entries]
        self.during_call(action, bodies)
        fault = self._take_fault(action)
        if fault is not None:
            hit = [b for i, b in enumerate(bodies) if fault.entries is None or i in fault.entries]
            self.on_fault(fault, hit)
            if fault.entries is None and not fault.after:
                return _answered(fault, action)
        good, bad = [], []
        for position, entry in enumerate(entries):
            if fault is not None and position in (fault.entries or ()):
                bad.append({"Id": entry["Id"], "Code": str(fault.error), "SenderFault": False})
                continue
            try:
                good.append({"Id": entry["Id"], **perform(entry)})
            except Refused as no:
                self.refusals.append(f"{action}: {no.reason or no.code}")
                bad.append(
                    {"Id": entry["Id"], "Code": no.code, "Message": no.reason, "SenderFault": True}
                )
        if fault is not None and fault.entries is None:
            return _answered(fault, action)
        return {"Successful": good, "Failed": bad} if bad else {"Successful": good}

    def _take_fault(self, action: str) -> Fault | None:
        fault = next((f for f in self.faults if f.action == action), None)
        if fault is not None:
            self.faults.remove(fault)
        return fault

    def _queue(self, url: str, action: str) -> Queue:
        if url not in self.queues:
            raise _error(f"{_BATCH_ERROR}NonExistentQueue", action)
        return self.queues[url]

    def _by_arn(self, arn: str) -> Queue:
        for queue in self.queues.values():
            if queue.arn == arn:
                return queue
        raise Refused("InvalidParameterValue", f"no queue {arn}")


@contextmanager
def _as_client_error(action: str) -> Iterator[None]:
    """Turn the refusal of a call into the error that boto3 raises."""
    try:
        yield
    except Refused as no:
        raise _error(no.code, action, no.reason) from None


def _answered(fault: Fault, action: str) -> Any:
    if fault.error is None:
        return {}
    raise _error(fault.error, action)


def _error(error: str | Exception, action: str, reason: str = "") -> Exception:
    if isinstance(error, Exception):
        return error
    status = 500 if error == "InternalError" else 400
    answer: Any = {
        "Error": {"Code": error, "Message": reason},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return ClientError(answer, action)


def _check_batch(ids: list[str], *, too_long: bool) -> None:
    wrong = {
        "EmptyBatchRequest": not ids,
        "TooManyEntriesInBatchRequest": len(ids) > 10,
        "BatchEntryIdsNotDistinct": len(set(ids)) < len(ids),
        "InvalidBatchEntryId": not all(_ENTRY_ID.fullmatch(i) for i in ids),
        "BatchRequestTooLong": too_long,
    }
    for code, is_wrong in wrong.items():
        if is_wrong:
            raise Refused(_BATCH_ERROR + code)


def _send(queue: Queue, message: dict[str, Any]) -> Message:
    trace = message.get("MessageSystemAttributes", {}).get("AWSTraceHeader", {})
    return queue.send(
        message["MessageBody"],
        message.get("MessageAttributes", {}),
        delay=message.get("DelaySeconds"),
        group_id=message.get("MessageGroupId"),
        deduplication_id=message.get("MessageDeduplicationId"),
        trace_header=trace.get("StringValue"),
    )


def _body_by_handle(queue: Queue) -> Callable[[dict[str, Any]], str]:
    def body(entry: dict[str, Any]) -> str:
        try:
            return queue.message_of(entry["ReceiptHandle"]).body
        except Refused:
            return ""

    return body
