"""What was about to be sent, and what was sent: on disk before it happens, for a killed run.

A file of JSON objects, one per line. ``{"ids": [...], "is": "sending"}`` is on the disk before the
call, ``"sent"`` before the delete. A message whose last line is ``sending`` is *in doubt*: the
process ended before it knew. One whose last line is ``sent`` only wants deleting.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from .errors import RedriveRefused
from .lines import open_lines

__all__ = ["Journal", "NoJournal", "Past"]

_SENDING, _SENT, _UNSENT, _DELETED = "sending", "sent", "unsent", "deleted"
_ENDED = "ended"


@dataclass
class Past:
    """What an earlier run has left.

    ``in_doubt``: message ids with the time (seconds since the epoch) when they were being sent.
    ``sent``: not known to be deleted.
    """

    run_id: str | None = None
    in_doubt: dict[str, float] = field(default_factory=dict)
    sent: set[str] = field(default_factory=set)

    @property
    def is_settled(self) -> bool:
        return not self.in_doubt and not self.sent


class NoJournal:
    """For a run that keeps none: killed, it can send again what it had sent."""

    def __init__(self) -> None:
        self.past = Past()

    def sending(self, ids: Iterable[str], now: float) -> None: ...
    def sent(self, ids: Iterable[str]) -> None: ...
    def unsent(self, ids: Iterable[str]) -> None: ...
    def deleted(self, ids: Iterable[str]) -> None: ...
    def ended(self) -> None: ...


class Journal(NoJournal):
    """A journal in a file, which is resumed if it exists. Use as a context manager.

    Arguments:
        path: the file. It stays when the run is over; another run may go on with it.
        source: URL of the queue (or path of the archive); a journal is about one source.
        run_id: of this run; a run that was killed keeps its id, so read ``run_id`` afterwards.

    Raises:
        RedriveRefused: the file is of another source, is in use, or is no journal.
    """

    def __init__(self, path: Path, *, source: str, run_id: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._file = open_lines(path, begins=b'{"source":', what="journal")
        try:
            self.past = self._read(source)
        except BaseException:
            self._file.close()
            raise
        self.run_id = self.past.run_id or run_id
        self._write({"source": source, "run": self.run_id}, sync=True)
        _sync_directory(path)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def sending(self, ids: Iterable[str], now: float) -> None:
        """Call before the send; returns when it is on the disk."""
        self._write({"is": _SENDING, "ids": list(ids), "at": now}, sync=True)

    def sent(self, ids: Iterable[str]) -> None:
        """Call before the delete; returns when it is on the disk."""
        self._write({"is": _SENT, "ids": list(ids)}, sync=True)

    def unsent(self, ids: Iterable[str]) -> None:
        """SQS has said that it did not take these."""
        self._write({"is": _UNSENT, "ids": list(ids)})

    def deleted(self, ids: Iterable[str]) -> None:
        self._write({"is": _DELETED, "ids": list(ids)})

    def ended(self) -> None:
        """The run knows of all its messages: the next one is a new run, not this one resumed."""
        self._write({"is": _ENDED}, sync=True)

    def _write(self, line: dict[str, object], *, sync: bool = False) -> None:
        if "ids" in line and not line["ids"]:
            return
        with self._lock:
            self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
            self._file.flush()
            if sync:
                os.fsync(self._file.fileno())

    def _read(self, source: str) -> Past:
        past = Past()
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            try:
                self._note(past, json.loads(line), source)
            except (ValueError, TypeError, KeyError, AttributeError):
                raise RedriveRefused(
                    f"Line {number} of journal {self._path} is damaged, so what was sent is not"
                    " known. Without that line, what it was about may be sent twice."
                ) from None
        return past

    def _note(self, past: Past, line: dict[str, Any], source: str) -> None:
        kind, ids = line.get("is"), line.get("ids", [])
        if not isinstance(ids, list) or not all(isinstance(id_, str) for id_ in ids):
            raise TypeError("ids")
        if kind is None:
            if line["source"] != source:
                raise RedriveRefused(
                    f"Journal {self._path} is of {line['source']}, not of {source}."
                )
            past.run_id = line["run"]
        elif kind == _SENDING:
            past.in_doubt.update(dict.fromkeys(ids, float(line["at"])))
        elif kind == _ENDED:
            past.run_id = None
        elif kind in (_SENT, _UNSENT, _DELETED):
            for id_ in ids:
                past.in_doubt.pop(id_, None)
                if kind == _SENT:
                    past.sent.add(id_)
                else:
                    past.sent.discard(id_)
        else:
            raise ValueError(kind)


def _sync_directory(path: Path) -> None:
    """Put the file's name on the disk, too."""
    descriptor = os.open(path.resolve().parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
