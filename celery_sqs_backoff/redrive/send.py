"""One SendMessageBatch, and what is known about each entry after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
)

from ..limits import MAX_DELAY_SECONDS
from ..queues import error_code
from .broker import EXPIRED_CREDENTIALS, Endpoint
from .letter import Letter
from .pack import Packed

__all__ = ["Answer", "deduplication_id", "is_denied", "is_in_passing", "send_batch"]

_THROTTLED = {
    "Throttling",
    "ThrottlingException",
    "RequestThrottled",
    "TooManyRequestsException",
    "SlowDown",
    "OverLimit",
}

#: About the queue or the caller, not about the message: no other message will fare better.
_DENIED_CODES = {
    "AccessDenied",
    "AccessDeniedException",
    "NonExistentQueue",
    "QueueDoesNotExist",
    "KmsAccessDenied",
    "KmsDisabled",
    "UnrecognizedClientException",
    "InvalidClientTokenId",
    "SignatureDoesNotMatch",
}


@dataclass
class Answer:
    """``again``: not sent, worth another try. ``refused``: with SQS's reason. ``in_doubt``: the
    answer was lost, or SQS failed while it had the messages. ``denied``: no message of ours will be
    taken. ``whole_call``: the error was the call's, not an entry's."""

    sent: list[Letter] = field(default_factory=list)
    again: list[Packed] = field(default_factory=list)
    refused: list[tuple[Packed, str]] = field(default_factory=list)
    in_doubt: list[Packed] = field(default_factory=list)
    error: str | None = None
    denied: bool = False
    whole_call: bool = False


def send_batch(
    destination: Endpoint, batch: Sequence[Packed], *, now: float, spread: float, rng: Random
) -> Answer:
    """Send up to ten messages to one queue. Never raises for an error of SQS or the network.

    Arguments:
        now: seconds since the epoch.
        spread: each gets a random DelaySeconds up to this (standard queues).
    """
    entries = [
        {"Id": str(i), **entry, **_for_destination(destination, letter, now, spread, rng)}
        for i, (letter, entry) in enumerate(batch)
    ]
    try:
        answer = destination.client.send_message_batch(
            QueueUrl=destination.url,
            Entries=entries,  # type: ignore[arg-type]
        )
    except (ClientError, BotoCoreError) as exc:
        return _answer_to_error(exc, list(batch))
    found = Answer()
    found.sent = [batch[int(entry["Id"])][0] for entry in answer.get("Successful", ())]
    for failed in answer.get("Failed", ()):
        packed, code = batch[int(failed["Id"])], failed["Code"].rpartition(".")[2]
        if failed.get("SenderFault") and code not in _THROTTLED:
            found.refused.append((packed, code))
        else:
            found.again.append(packed)
            found.error = code
    return found


def deduplication_id(letter: Letter) -> str:
    """A FIFO deduplication id of this replay.

    Not the message's own: within five minutes of its first send SQS would throw the replay away
    and report it as sent. The message id is new in each life of a message, so a run that is
    resumed asks with the same id, and SQS itself sees to it that nothing is sent twice.
    """
    return f"redrive-{letter.id}"


def is_in_passing(exc: ClientError | BotoCoreError) -> bool:
    """Whether the same call may work in a moment."""
    if isinstance(exc, ClientError):
        status = exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500)
        return status >= 500 or error_code(exc) in _THROTTLED | EXPIRED_CREDENTIALS
    return True


def is_denied(code: str) -> bool:
    return code in _DENIED_CODES


def _answer_to_error(exc: ClientError | BotoCoreError, batch: list[Packed]) -> Answer:
    code = error_code(exc)
    if isinstance(exc, EndpointConnectionError | ConnectTimeoutError):
        return Answer(again=batch, error=code, whole_call=True)
    if not isinstance(exc, ClientError):
        return Answer(in_doubt=batch, error=code, whole_call=True)
    if is_denied(code):
        return Answer(again=batch, error=code, denied=True)
    if code in _THROTTLED | EXPIRED_CREDENTIALS:
        return Answer(again=batch, error=code, whole_call=True)
    if is_in_passing(exc):
        return Answer(in_doubt=batch, error=code, whole_call=True)
    return Answer(refused=[(packed, code) for packed in batch], error=code)


def _for_destination(
    destination: Endpoint, letter: Letter, now: float, spread: float, rng: Random
) -> dict[str, object]:
    """Group, deduplication and delay, as the type of the queue wants them."""
    added: dict[str, object] = {}
    if letter.group_id is not None:  # on standard queues too: fair queues
        added["MessageGroupId"] = letter.group_id
    if destination.is_fifo:
        added.setdefault("MessageGroupId", "default")
        added["MessageDeduplicationId"] = deduplication_id(letter)
        return added
    delay = letter.due_in(now)
    if spread:
        delay += rng.uniform(0, spread)
    if delay >= 1:
        added["DelaySeconds"] = min(MAX_DELAY_SECONDS, int(delay))
    return added
