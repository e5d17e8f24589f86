"""Dead letters in a file: one JSON object per line, everything that SQS has told of a message."""

from __future__ import annotations

import base64
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

from ..sqs.arns import QueueArn
from ..sqs.calls import Results
from .errors import RedriveRefused
from .lines import close_lines, open_lines, open_to_read
from .message import DeadLetter
from .queues import Broker, Depth, Endpoint

__all__ = ["Archive", "ArchiveRoute", "ArchiveSource"]


class Archive:
    """Appends messages to a file, each batch on the disk when :meth:`write` returns.

    Use as a context manager. It holds bodies and arguments: the user's data.

    Arguments:
        path: the file; created for us alone.
        source: ARN of the queue that the messages are in.

    Raises:
        RedriveRefused: the file cannot be written, is in use, is not an archive, or is not ours
            alone.
    """

    def __init__(self, path: Path, *, source: str | None = None) -> None:
        self._lock = threading.Lock()
        self._source = source
        self._file = open_lines(path, begins=b'{"MessageId":', what="archive")

    def __enter__(self) -> Archive:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        close_lines(self._file)

    def write(self, messages: Sequence[DeadLetter], destinations: Sequence[str | None]) -> None:
        """Append messages, with the queue (ARN) that each would go to.

        Raises:
            OSError: the disk is full, for one.
        """
        lines = [
            json.dumps(
                {**_jsonable(message.message), "Source": self._source, "Destination": destination},
                separators=(",", ":"),
            )
            for message, destination in zip(messages, destinations, strict=True)
        ]
        with self._lock:
            self._file.write("".join(f"{line}\n" for line in lines).encode())
            self._file.flush()
            os.fsync(self._file.fileno())


class ArchiveSource:
    """Reads messages from a file, once each. Nothing is ever deleted from it.

    Raises:
        RedriveRefused: there is no such file, it is not ours alone, or a line of it is not a dead
            letter.
    """

    is_archive = True

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.key = str(path.resolve())
        self._lock = threading.Lock()
        self.is_fifo = False
        self._left = 0
        for message in _once_each(_messages(path)):
            self._left += 1
            named = (str(message.message.get(name)) for name in ("Source", "Destination"))
            self.is_fifo |= any(name.endswith(".fifo") for name in named)
        self._rest = _once_each(_messages(path))

    def depth(self) -> Depth:
        return Depth(self._left, 0, 0)

    def receive(self, messages: int, hold_seconds: int) -> list[DeadLetter]:
        with self._lock:
            found = list(islice(self._rest, messages))
            self._left -= len(found)
            return found

    def delete(self, handles: Sequence[str]) -> Results:
        return [None] * len(handles)

    def hide(self, handles: Sequence[str], seconds: int) -> Results:
        return [None] * len(handles)


class ArchiveRoute:
    """Where a message of an archive goes: ``to``, or what the archive says.

    The archive is believed as far as SQS agrees: its destination must be one of the queues that
    have the archive's source as their dead-letter queue.
    """

    retention_seconds = None

    def __init__(self, broker: Broker, to: str | None) -> None:
        self._broker = broker
        self.fixed = self.default = broker.find(to) if to is not None else None
        self._sources: dict[str, dict[str, Endpoint]] = {}

    def destination(self, message: DeadLetter) -> Endpoint | str:
        """Where a message goes, or why nobody knows."""
        if self.fixed is not None:
            return self.fixed
        source, to = message.message.get("Source"), message.message.get("Destination")
        if not isinstance(source, str) or not isinstance(to, str):
            return "the archive names no destination: give one (to)"
        if source not in self._sources:
            self._sources[source] = self._sources_of(source)
        return self._sources[source].get(to) or (
            "the archive's destination does not have its source as dead-letter queue, or is not"
            " there: give a destination (to)"
        )

    def _sources_of(self, source: str) -> dict[str, Endpoint]:
        try:
            arn = QueueArn.parse(source)
            return {str(queue.arn): queue for queue in self._broker.find(str(arn)).sources()}
        except (ValueError, RedriveRefused):
            return {}  # messages of other queues may go somewhere: no reason to end


def _once_each(messages: Iterable[DeadLetter]) -> Iterator[DeadLetter]:
    seen: set[int] = set()  # hashes: 200,000 texts would take 20 MB
    for message in messages:
        if hash(message.id) not in seen:
            seen.add(hash(message.id))
            yield message


def _messages(path: Path) -> Iterator[DeadLetter]:
    with open_to_read(path, what="archive") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield DeadLetter(_message(json.loads(line)))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
                why = f"Line {number} of archive {path} is not a dead letter ({type(exc).__name__})"
                if not line.endswith(b"\n"):
                    why += "; it is truncated, as by a kill. Its message was not deleted: remove it"
                raise RedriveRefused(f"{why}.") from None


def _jsonable(message: Mapping[str, Any]) -> dict[str, Any]:
    found = {"MessageId": message["MessageId"]}  # the first, by which an archive is known
    found |= {key: value for key, value in message.items() if key != "ReceiptHandle"}
    found["MessageAttributes"] = {
        name: {
            key: base64.b64encode(value).decode() if key == "BinaryValue" else value
            for key, value in attribute.items()
            if key in ("DataType", "StringValue", "BinaryValue")
        }
        for name, attribute in (message.get("MessageAttributes") or {}).items()
    }
    return found


def _message(found: dict[str, Any]) -> dict[str, Any]:
    for attribute in (found.get("MessageAttributes") or {}).values():
        if "BinaryValue" in attribute:
            attribute["BinaryValue"] = base64.b64decode(attribute["BinaryValue"], validate=True)
    if not isinstance(found["Body"], str) or not isinstance(found["MessageId"], str):
        raise TypeError("Body and MessageId are text")
    return found
