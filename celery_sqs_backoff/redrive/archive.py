"""Dead letters in a file: one JSON object per line, everything that SQS has told of a message."""

from __future__ import annotations

import base64
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

from .broker import Broker, Endpoint
from .errors import RedriveRefused
from .letter import Letter
from .lines import open_lines

__all__ = ["Archive", "ArchiveRoute", "ArchiveSource", "dump"]


class Archive:
    """Appends letters to a file, each batch on the disk when :meth:`write` returns.

    Use as a context manager. It holds bodies and arguments: the user's data.

    Raises:
        RedriveRefused: the file cannot be written, is in use, or is no archive.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        # Not readable for others: what is in a queue needs credentials to be read, too.
        self._file = open_lines(path, begins=b'{"MessageId":', what="archive")

    def __enter__(self) -> Archive:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def write(self, letters: Sequence[Letter], destinations: Sequence[str | None]) -> None:
        """Append letters, with the queue (URL or name) that each would go to."""
        lines = [
            json.dumps(
                {**_jsonable(letter.message), "Destination": destination}, separators=(",", ":")
            )
            for letter, destination in zip(letters, destinations, strict=True)
        ]
        with self._lock:
            self._file.write("".join(f"{line}\n" for line in lines).encode())
            self._file.flush()
            os.fsync(self._file.fileno())


def dump(letters: Sequence[Letter], destinations: Sequence[str | None], path: Path) -> None:
    """Append letters to an archive; they are on the disk when this returns."""
    with Archive(path) as archive:
        archive.write(letters, destinations)


class ArchiveSource:
    """Reads letters from a file, once each. Nothing is ever deleted from it.

    Raises:
        RedriveRefused: there is no such file, or a line of it is no letter.
    """

    is_archive = True

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.url = str(path.resolve())
        self._lock = threading.Lock()
        try:
            self._count = sum(1 for _ in _letters(path))
        except OSError as exc:
            raise RedriveRefused(f"Cannot read archive {path}: {exc.strerror}") from exc
        self._rest = _letters(path)
        self._left = self._count

    def count(self) -> int:
        return self._left

    def receive(self, messages: int) -> list[Letter]:
        with self._lock:
            found = list(islice(self._rest, messages))
            self._left -= len(found)
            return found

    def delete(self, letters: Sequence[Letter]) -> dict[str, str]:
        return {}

    def is_aside(self, letter: Letter) -> bool:
        return False

    def is_ours(self, letter: Letter) -> bool:
        return True

    def put_aside(self, letters: Sequence[Letter]) -> None: ...
    def forget(self, letters: Sequence[Letter]) -> None: ...
    def give_back(self, letters: Sequence[Letter]) -> None: ...
    def give_all_back(self) -> None: ...
    def renew(self) -> None: ...


class ArchiveRoute:
    """Where a letter of an archive goes: ``to``, or what the archive says."""

    unknown = "the archive names no queue that is there: give one (to)"

    def __init__(self, broker: Broker, to: str | None) -> None:
        self._broker = broker
        self.default = broker.find(to) if to else None
        self._known: dict[str, Endpoint | None] = {}

    def destination(self, letter: Letter) -> Endpoint | None:
        """``None`` if the archive names none, or one that is not there."""
        if self.default is not None:
            return self.default
        url = letter.message.get("Destination")
        if not isinstance(url, str):
            return None
        if url not in self._known:
            try:
                self._known[url] = self._broker.find(url)
            except RedriveRefused:  # others may have gone elsewhere already: no reason to end
                self._known[url] = None
        return self._known[url]


def _letters(path: Path) -> Iterator[Letter]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield Letter(_message(json.loads(line)))
            except (ValueError, KeyError, TypeError, AttributeError) as exc:
                why = f"Line {number} of archive {path} is no dead letter ({type(exc).__name__})."
                if not line.endswith("\n"):
                    why += " It is cut short, as by a kill: its message was not deleted. Remove it."
                raise RedriveRefused(why) from None


def _jsonable(message: Mapping[str, Any]) -> dict[str, Any]:
    found = {"MessageId": message["MessageId"]}  # the first, by which an archive is known
    found |= {key: value for key, value in message.items() if key != "ReceiptHandle"}
    found["MessageAttributes"] = {
        name: {
            key: base64.b64encode(value).decode() if key == "BinaryValue" else value
            for key, value in attribute.items()
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
