"""Makes calls to SQS on one queue. Exceptions of a call become results.

The caller decides about a failed call, for example whether to repeat it. A batch call returns one
result per entry. An entry succeeded only if SQS lists it as successful.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import methodcaller
from typing import TYPE_CHECKING, Any, TypeVar

from botocore import xform_name

from .errors import NOT_LISTED, Failure, Kind, Operation, failure_of, failure_of_entry
from .limits import MAX_BATCH_ENTRIES

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient

_Result = TypeVar("_Result")

#: One result per entry of a batch, in the order of the entries. ``None``: the entry succeeded.
Results = list[Failure | None]

#: The attributes that every ReceiveMessage requests.
RECEIVE_ATTRIBUTES: Mapping[str, Sequence[str]] = {
    "MessageSystemAttributeNames": [
        "ApproximateFirstReceiveTimestamp",
        "ApproximateReceiveCount",
        "AWSTraceHeader",
        "DeadLetterQueueSourceArn",
        "MessageDeduplicationId",
        "MessageGroupId",
        "SentTimestamp",
    ],
    "MessageAttributeNames": ["All"],
}


@dataclass(frozen=True, slots=True)
class Received:
    """The messages that one ReceiveMessage returned, or its failure."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    failure: Failure | None = None


class Calls:
    """The calls to SQS on one queue.

    Arguments:
        client: a boto3 client, or a callable that returns the client for the next call to SQS.
        queue_url: the URL of the queue.
        refresh: called if SQS refuses the credentials of a call. Afterwards ``client`` returns a
            client with newer credentials, and the call is repeated once. ``None``: no repeat.

    No method raises if a call fails. A batch of more than ten entries raises ``ValueError``,
    because it is a bug of the caller.
    """

    __slots__ = ("_client", "_refresh", "queue_url")

    def __init__(
        self,
        client: SQSClient | Callable[[], SQSClient],
        queue_url: str,
        *,
        refresh: Callable[[], object] | None = None,
    ) -> None:
        self._client = client
        self._refresh = refresh
        self.queue_url = queue_url

    def on(self, queue_url: str) -> Calls:
        """Return an object for calls on another queue with the same client."""
        return Calls(self._client, queue_url, refresh=self._refresh)

    def receive(
        self,
        *,
        max_messages: int,
        wait_seconds: int,
        visibility_timeout_seconds: int | None = None,
    ) -> Received:
        """Receive up to ten messages with all their attributes.

        Arguments:
            max_messages: the highest number of messages to receive, 1 to 10.
            wait_seconds: the long poll, 0 to 20; 0 = no long poll.
            visibility_timeout_seconds: for the received messages; ``None`` = the queue's own.
        """
        parameters: dict[str, Any] = {
            "QueueUrl": self.queue_url,
            "MaxNumberOfMessages": max_messages,
            "WaitTimeSeconds": wait_seconds,
            **RECEIVE_ATTRIBUTES,
        }
        if visibility_timeout_seconds is not None:
            parameters["VisibilityTimeout"] = visibility_timeout_seconds
        result = self.attempt(
            Operation.RECEIVE,
            lambda client: list(client.receive_message(**parameters).get("Messages") or ()),
        )
        return Received(failure=result) if isinstance(result, Failure) else Received(result)

    def change_visibility(self, entries: Sequence[tuple[str, int]]) -> Results:
        """Hide up to ten messages, each given as (receipt handle, seconds). 0 s = show now."""
        numbered = [{"ReceiptHandle": handle, "VisibilityTimeout": s} for handle, s in entries]
        return self._batch(Operation.CHANGE_VISIBILITY, numbered)

    def delete(self, receipt_handles: Sequence[str]) -> Results:
        """Delete up to ten messages."""
        entries = [{"ReceiptHandle": handle} for handle in receipt_handles]
        return self._batch(Operation.DELETE, entries)

    def send(self, entries: Sequence[Mapping[str, Any]]) -> Results:
        """Send up to ten messages, given as entries of SendMessageBatch without ``Id``."""
        return self._batch(Operation.SEND, entries)

    def send_nothing(self) -> Failure | None:
        """Test the permission to send, with a SendMessageBatch without entries.

        SQS refuses this call in any case, and sends no message. The failure's kind is
        ``Kind.DENIED`` if the client's identity has no permission to send to the queue.
        """
        result: object = self.attempt(
            Operation.SEND,
            methodcaller("send_message_batch", QueueUrl=self.queue_url, Entries=[]),
        )
        return result if isinstance(result, Failure) else None

    def attributes(self, names: Sequence[str] = ("All",)) -> dict[str, str] | Failure:
        """Return the queue's attributes by name, or the failure of the call."""
        parameters = {"QueueUrl": self.queue_url, "AttributeNames": list(names)}
        return self.attempt(
            Operation.GET_ATTRIBUTES,
            lambda client: dict(client.get_queue_attributes(**parameters)["Attributes"]),
        )

    def attempt(
        self, operation: Operation, call: Callable[[Any], _Result], *, again: bool = True
    ) -> _Result | Failure:
        """Make a call to SQS, and return its result or failure.

        Arguments:
            call: makes the call with a boto3 client.
            again: whether to repeat the call once after a refresh of the credentials.
        """
        try:
            return call(self._client() if callable(self._client) else self._client)
        except Exception as exc:  # noqa: BLE001  # any exception is a result
            failure = failure_of(exc, operation)
        if again and self._refresh is not None and failure.newer_credentials_may_help:
            try:
                self._refresh()
            except Exception as exc:  # noqa: BLE001  # the source of the credentials failed
                return replace(failure_of(exc, operation), kind=Kind.CREDENTIALS)
            return self.attempt(operation, call, again=False)
        return failure

    def _batch(self, operation: Operation, entries: Sequence[Mapping[str, Any]]) -> Results:
        """Make a batch call, and return one result per entry, in the order of the entries."""
        if len(entries) > MAX_BATCH_ENTRIES:
            raise ValueError(f"{len(entries)} entries: SQS takes {MAX_BATCH_ENTRIES} in a batch")
        if not entries:
            return []
        numbered = [{**entry, "Id": str(i)} for i, entry in enumerate(entries)]
        method = xform_name(operation.value)
        response: Any = self.attempt(
            operation,
            methodcaller(method, QueueUrl=self.queue_url, Entries=numbered),
        )
        if isinstance(response, Failure):
            return [response] * len(entries)
        listed: dict[str, Failure | None] = {}
        # If the response is malformed, the entries that were not read from it count as not listed.
        with suppress(AttributeError, KeyError, TypeError):
            for entry in response.get("Successful") or ():
                listed[entry["Id"]] = None
            for entry in response.get("Failed") or ():
                listed[entry["Id"]] = failure_of_entry(entry, operation)
        return [listed.get(entry["Id"], NOT_LISTED) for entry in numbered]
