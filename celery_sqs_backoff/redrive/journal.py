"""The ledger's log on disk, for a run that is killed.

A file of JSON objects, one per line. ``{"is": "sending", "ids": [...]}`` is on the disk before the
call, ``"sent"`` before the delete. A message whose last line is ``sending`` is *in doubt*: the
process ended before it knew. One whose last line is ``sent`` only wants deleting.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from .errors import RedriveRefused
from .lines import close_lines, open_lines
from .past import Entry, Past

__all__ = ["Journal", "NoJournal"]

#: What is on the disk before the run goes on. The others cost a repeated delete if they are lost.
_SYNCED = {"sending", "sent", "ended"}

#: After so long a run that was killed or lost SQS is not resumed, but followed by a new one: what
#: comes back of its messages by then tells of another time. What it had sent is still known.
_RESUMED_SECONDS = 3600

_KINDS = {"sending", "sent", "unsent", "deleted", "gone", "ended"}


class NoJournal:
    """For a run that keeps none: killed, it can send again what it had sent."""

    #: The file, if there is one.
    path: Path | None = None

    def __init__(self) -> None:
        self.past = Past()

    def write(self, entry: Entry) -> None: ...


class Journal(NoJournal):
    """A journal in a file, which is resumed if it exists. Use as a context manager.

    What a run that ended has settled is removed when the next one opens it.

    Arguments:
        path: the file. It stays when the run is over; another run may go on with it.
        source: ARN of the queue (or path of the archive); a journal is about one source.
        run_id: of this run; one that was killed within the hour keeps its id, so read ``run_id``
            afterwards.
        now: seconds since the epoch.

    Raises:
        RedriveRefused: the file is of another source, is in use, is not a journal, is not ours
            alone, or cannot be written.
    """

    def __init__(
        self, path: Path, *, source: str, run_id: str, now: Callable[[], float] = time.time
    ) -> None:
        self.path = self._path = path
        self._lock = threading.Lock()
        self._file = open_lines(path, begins=b'{"source":', what="journal")
        try:
            self.past = self._read(source)
            if self.past.run_id is None and self.past.is_settled:
                self._file.truncate(0)
            is_old = now() - self.past.last_at > _RESUMED_SECONDS
            self.run_id = run_id if is_old else self.past.run_id or run_id
            self.past.begin(self.run_id)
            self._append({"source": source, "run": self.run_id}, sync=True)
            _sync_directory(path)
        except BaseException as exc:  # whatever it was: the file stays locked as long as it is open
            close_lines(self._file)
            if isinstance(exc, OSError):
                raise RedriveRefused(f"Cannot write journal {path}: {exc.strerror}.") from exc
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        close_lines(self._file)

    def write(self, entry: Entry) -> None:
        """Append an entry. What must be on the disk before the run goes on, is, on return.

        Raises:
            OSError: the disk is full, for one.
        """
        if not entry.ids and entry.kind != "ended":
            return
        line: dict[str, object] = {"is": entry.kind}
        if entry.ids:
            line["ids"] = list(entry.ids)
        if entry.kind == "sending":
            line["at"] = entry.at
        self._append(line, sync=entry.kind in _SYNCED)

    def _append(self, line: dict[str, object], *, sync: bool) -> None:
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
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
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
            past.begin(str(line["run"]))
        elif kind in _KINDS:
            at = line["at"] if kind == "sending" else 0
            past.apply(Entry(kind, tuple(ids), float(at)))
        else:
            raise ValueError(kind)


def _sync_directory(path: Path) -> None:
    """Put the file's name on the disk, too."""
    descriptor = os.open(path.resolve().parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
