"""Read and write the files of a redrive: a journal of sends, and archives of messages.

Both have one JSON object per line, and lines are only appended. A redrive refuses a file that other
users can read or write: a forged journal would make it delete messages that were never sent, and an
archive holds user data.
"""

from __future__ import annotations

import base64
import fcntl
import json
import mmap
import os
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from ..sqs.dead_letter import sendable
from .errors import RedriveRefused
from .message import DlqMessage

#: The run waits until journal lines of these kinds are on the disk. A crash of the machine may lose
#: lines of the other kinds. A lost line does not make the next run send a message twice. The next
#: run only deletes a message a second time, or treats an unsent message as in doubt.
_SYNCED = {"sending", "sent", "ended"}

#: Journal lines of these kinds say that SQS has not accepted a message, or that a message has left
#: the source. The next run treats such a message as a new one.
_SETTLED = {"unsent", "deleted", "gone"}


T = TypeVar("T")


class JsonLines:
    """A file to which one process at a time appends. Safe for threads. Use as a context manager.

    A missing file is created with mode 600. A last line that a kill has truncated is removed,
    because otherwise the next line would be appended to the truncated line.

    Arguments:
        begins: the first bytes that a file of this kind must have.
        what: the kind of file, for error texts.

    Raises:
        RedriveRefused: the file cannot be opened, is in use, belongs to other users, can be read or
            written by them, is a link, or is not of this kind. A refused file is not changed.
    """

    def __init__(self, path: Path, *, begins: bytes, what: str) -> None:
        self._lock = threading.Lock()
        self._file = file = _open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, "a+b", what)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.seek(0)
            head = file.read(len(begins))
            if head != begins[: len(head)] or (b"\n" in head):
                raise RedriveRefused(f"{path} is not a redrive {what}. Name another file.")
            _remove_truncated_line(file)
        except BaseException as exc:  # close the file, because an open file stays locked
            self.close()
            if isinstance(exc, BlockingIOError):
                raise RedriveRefused(
                    f"{what.capitalize()} {path} is in use by another run."
                ) from exc
            if isinstance(exc, OSError):  # some network file systems have no locks
                why = f"Cannot lock {what} {path}: {exc.strerror}. Name one on another disk."
                raise RedriveRefused(why) from exc
            raise

    def append(self, objects: Sequence[Mapping[str, object]], *, sync: bool) -> None:
        """Append a line for each object. With ``sync``, return only when the lines are on the disk.

        Raises:
            OSError: for example, the disk is full.
        """
        lines = [json.dumps(each, separators=(",", ":"), default=_encode) for each in objects]
        with self._lock:
            self._file.write("".join(f"{line}\n" for line in lines).encode())
            self._file.flush()
            if sync:
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file. Never raises, because a failed write has already raised in ``append``."""
        with suppress(OSError):
            self._file.close()

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class NoJournal:
    """A journal that records nothing, for a run without a journal file.

    If such a run is killed, the next run can send messages a second time. The subclass
    :class:`Journal` fills the attributes from its file.

    Attributes:
        path: the file; ``None`` = no file.
        past: messages that earlier runs have left in doubt or not deleted, by ID. The value is the
            time of the first send that SQS did not answer (seconds since the epoch). ``None`` = SQS
            has accepted the message, and the run only has to delete it.
        last_at: when the last send began, in seconds since the epoch; 0 = never.
        is_resumed: whether the last run with this file wrote no ``ended`` line, for example because
            it was killed.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self.past: dict[str, float | None] = {}
        self.last_at, self.is_resumed = 0.0, False

    def write(self, kind: str, ids: Sequence[str], at: float = 0.0) -> None: ...


class Journal(NoJournal, JsonLines):
    """A file that records each send, so that a run after a kill can continue.

    The line ``{"is": "sending", "ids": [...]}`` is on the disk before the call to SQS. The ``sent``
    line is on the disk before the delete. If the last line of a message is ``sending``, the message
    is *in doubt*: SQS's answer was lost, or the process ended before SQS answered. If its last line
    is ``sent``, the next run only has to delete the message. If the last run wrote its ``ended``
    line, and left no message in doubt or undeleted, the next run empties the file.

    Arguments:
        path: the file. It stays when the run is over, and another run may continue with this file.
        source: ARN of the dead-letter queue, or ``restore to`` and this ARN. Each journal belongs
            to one source.

    Raises:
        RedriveRefused: the file belongs to another source, is in use, is not a journal, can be read
            or written by other users, or cannot be written.
    """

    def __init__(self, path: Path, *, source: str) -> None:
        NoJournal.__init__(self)
        JsonLines.__init__(self, path, begins=b'{"source":', what="journal")
        self.path, self._source = path, source
        try:
            self._read()
            if not (self.is_resumed or self.past):
                self._file.truncate(0)
            self.append([{"source": source}], sync=True)
        except BaseException as exc:  # close the file, because an open file stays locked
            self.close()
            if isinstance(exc, OSError):
                raise RedriveRefused(f"Cannot write journal {path}: {exc.strerror}.") from exc
            raise

    def write(self, kind: str, ids: Sequence[str], at: float = 0.0) -> None:
        """Append a line. A ``sending``, ``sent`` or ``ended`` line is on the disk on return.

        Arguments:
            kind: ``sending``, ``sent``, ``unsent``, ``deleted``, ``gone`` or ``ended``.
            ids: IDs of the messages. Without IDs, nothing is written, unless
                ``kind`` is ``ended``.
            at: when the send began, in seconds since the epoch. For ``sending`` only.

        Raises:
            OSError: for example, the disk is full.
        """
        if ids or kind == "ended":
            line: dict[str, object] = {"is": kind} | ({"ids": list(ids)} if ids else {})
            line |= {"at": at} if kind == "sending" else {}
            self.append([line], sync=kind in _SYNCED)

    def _read(self) -> None:
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            try:
                self._apply(json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                raise RedriveRefused(
                    f"Line {number} of journal {self.path} is damaged, so it is not known which"
                    " messages were sent. If you remove the line, its messages may be sent twice."
                ) from None

    def _apply(self, line: dict[str, Any]) -> None:
        kind, ids = line.get("is"), line.get("ids", [])
        if not isinstance(ids, list) or not all(isinstance(id_, str) for id_ in ids):
            raise TypeError("ids")
        if kind is None and line["source"] != self._source:
            raise RedriveRefused(
                f"Journal {self.path} belongs to {line['source']}, not to {self._source}."
            )
        if kind in (None, "ended"):
            self.is_resumed = kind is None
        elif kind == "sending":
            self.last_at = max(self.last_at, float(line["at"]))
            for id_ in ids:
                self.past.setdefault(id_, float(line["at"]))
        elif kind == "sent":
            self.past.update(dict.fromkeys(ids))
        elif kind in _SETTLED:
            for id_ in ids:
                self.past.pop(id_, None)
        else:
            raise ValueError(kind)


class Archive(JsonLines):
    """A file of dead letters.

    Each line has all that SQS returned for a message, except the receipt handle. The line also has
    the ARNs of the message's source and destination. The message bodies are user data.

    Arguments:
        path: the file. If it is missing it is created with mode 600.
        source: ARN of the queue that the messages are in.

    Raises:
        RedriveRefused: the file cannot be written, is in use, is not an archive, or can be read or
            written by other users.
    """

    def __init__(self, path: Path, *, source: str | None = None) -> None:
        super().__init__(path, begins=b'{"MessageId":', what="archive")
        self._source = source

    def write(self, messages: Sequence[DlqMessage], destinations: Sequence[str | None]) -> None:
        """Append messages, each with the ARN of its destination. Return only when all are on disk.

        Arguments:
            destinations: ARNs in the order of the messages; ``None`` = not known.

        Raises:
            OSError: for example, the disk is full.
        """
        objects = []
        for message, destination in zip(messages, destinations, strict=True):
            found = dict(message.message)
            found.pop("ReceiptHandle", None)
            attributes: Mapping[str, Any] = found.get("MessageAttributes") or {}
            objects.append(
                {"MessageId": message.id}  # must be first: ``begins`` recognises an archive by it
                | found
                | {"MessageAttributes": {n: sendable(value) for n, value in attributes.items()}}
                | {"Source": self._source, "Destination": destination}
            )
        self.append(objects, sync=True)


def read_archive(path: Path) -> Iterator[DlqMessage]:
    """Yield the messages of an archive, in the order of its lines.

    Raises:
        RedriveRefused: the file does not exist, can be read or written by other users, or has a
            line that is not a dead letter.
    """
    with _open(path, os.O_RDONLY, "rb", "archive") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield DlqMessage(_message(json.loads(line)))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
                why = f"Line {number} of archive {path} is not a dead letter ({type(exc).__name__})"
                if not line.endswith(b"\n"):
                    why += (
                        "; it is truncated. If a kill ended the redrive that wrote the archive, the"
                        " message is still on the queue: remove the line. If the file is a damaged"
                        " copy, replace it by the complete file"
                    )
                raise RedriveRefused(f"{why}.") from None


def _message(found: dict[str, Any]) -> dict[str, Any]:
    for attribute in (found.get("MessageAttributes") or {}).values():
        if "BinaryValue" in attribute:
            attribute["BinaryValue"] = base64.b64decode(attribute["BinaryValue"], validate=True)
    if not isinstance(found["Body"], str) or not isinstance(found["MessageId"], str):
        raise TypeError("Body and MessageId are text")
    return found


def _encode(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _open(path: Path, flags: int, mode: str, what: str) -> BinaryIO:
    name = f"{what.capitalize()} {path}"
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as exc:
        why = "it is a link: name the file itself" if path.is_symlink() else exc.strerror
        raise RedriveRefused(f"Cannot open {what} {path}: {why}.") from exc
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise RedriveRefused(f"{name} is not a regular file that you own. Name another file.")
        if found.st_mode & 0o077:
            raise RedriveRefused(f"{name} is open to other users. If it is yours: chmod 600.")
        return os.fdopen(descriptor, mode)  # type: ignore[return-value]  # both modes are binary
    except BaseException:  # no file object owns the descriptor yet, so close it here
        os.close(descriptor)
        raise


def _remove_truncated_line(file: BinaryIO) -> None:
    size = file.seek(0, os.SEEK_END)
    if size:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            whole = text.rfind(b"\n") + 1
        if whole != size:
            file.truncate(whole)
