"""Where letters come from: a queue."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from botocore.exceptions import BotoCoreError, ClientError

from ..queues import error_code
from .broker import Endpoint
from .holds import Holds
from .letter import Letter

__all__ = ["QueueSource", "Source"]

#: One long poll asks all of SQS's servers; a short one does not, and can miss messages.
_WAIT_SECONDS = 1

WANTED: dict[str, Any] = {
    "MessageSystemAttributeNames": ["All"],
    "MessageAttributeNames": ["All"],
}


class Source(Protocol):
    """What the engine asks of a queue, or of an archive of one. Safe for threads."""

    name: str
    url: str
    #: Nothing can be deleted from it.
    is_archive: bool

    def count(self) -> int: ...
    def receive(self, messages: int) -> list[Letter]: ...
    def delete(self, letters: Sequence[Letter]) -> dict[str, str]: ...
    def put_aside(self, letters: Sequence[Letter]) -> None: ...
    def is_aside(self, letter: Letter) -> bool: ...
    def is_ours(self, letter: Letter) -> bool: ...
    def forget(self, letters: Sequence[Letter]) -> None: ...
    def give_back(self, letters: Sequence[Letter]) -> None: ...
    def give_all_back(self) -> None: ...
    def renew(self) -> None: ...


class QueueSource:
    """A dead-letter queue.

    Arguments:
        endpoint: the queue.
        hold_seconds: for how long a message is hidden by its receive; renewed when half is over.
        clock: seconds, monotonic.
    """

    is_archive = False

    def __init__(
        self, endpoint: Endpoint, *, hold_seconds: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = endpoint.name
        self.url = endpoint.url
        self._endpoint = endpoint
        self._holds = Holds(endpoint, hold_seconds)
        self._clock = clock

    def count(self) -> int:
        """Messages in the queue, hidden and delayed ones included."""
        return self._endpoint.depth().total

    def receive(self, messages: int) -> list[Letter]:
        """Receive up to ten messages, with all their attributes. Raises botocore's errors."""
        requested_at = self._clock()
        answer = self._endpoint.client.receive_message(
            QueueUrl=self.url,
            MaxNumberOfMessages=messages,
            VisibilityTimeout=self._holds.seconds,
            WaitTimeSeconds=_WAIT_SECONDS,
            **WANTED,
        )
        letters = [Letter(message) for message in answer.get("Messages", ())]
        self._holds.add([x for x in letters if not self._holds.is_aside(x)], requested_at)
        return letters

    def delete(self, letters: Sequence[Letter]) -> dict[str, str]:
        """Delete up to ten messages; return the ids that SQS did not delete, with the reason."""
        try:
            answer = self._endpoint.client.delete_message_batch(
                QueueUrl=self.url,
                Entries=[
                    {"Id": str(i), "ReceiptHandle": letter.handle}
                    for i, letter in enumerate(letters)
                ],
            )
        except (ClientError, BotoCoreError) as exc:
            return dict.fromkeys((letter.id for letter in letters), error_code(exc))
        failed = {letters[int(f["Id"])].id: f["Code"] for f in answer.get("Failed", ())}
        self._holds.drop([letter for letter in letters if letter.id not in failed])
        return failed

    def put_aside(self, letters: Sequence[Letter]) -> None:
        self._holds.put_aside(letters)

    def is_aside(self, letter: Letter) -> bool:
        return self._holds.is_aside(letter)

    def is_ours(self, letter: Letter) -> bool:
        return self._holds.is_ours(letter, self._clock())

    def forget(self, letters: Sequence[Letter]) -> None:
        """Hide these no longer; they come back when their time is over."""
        self._holds.drop(letters)

    def give_back(self, letters: Sequence[Letter]) -> None:
        self._holds.give_back(letters)

    def give_all_back(self) -> None:
        self._holds.give_all_back()

    def renew(self) -> None:
        self._holds.renew(self._clock())
