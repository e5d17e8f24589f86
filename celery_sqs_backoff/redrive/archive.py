"""Dead letters in a file: one JSON object per line, everything that SQS has told of a message."""

from __future__ import annotations

import base64
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from .errors import RedriveRefused
from .lines import close_lines, open_lines, open_to_read
from .message import DlqMessage


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

    def write(self, messages: Sequence[DlqMessage], destinations: Sequence[str | None]) -> None:
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


def read_archive(path: Path) -> Iterator[DlqMessage]:
    """Read the messages of an archive, in its order.

    Raises:
        RedriveRefused: there is no such file, it is not ours alone, or a line of it is not a dead
            letter.
    """
    with open_to_read(path, what="archive") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield DlqMessage(_message(json.loads(line)))
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
