"""Keep in a file which messages are being sent and were sent, for a run after a kill.

It has one JSON object per line. ``{"is": "sending", "ids": [...]}`` is on the disk before the call,
``"sent"`` before the delete. A message is *in doubt* if its last line is ``sending``: the
process ended before it knew. If its last line is ``sent``, it only has to be deleted.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .errors import RedriveRefused
from .lines import close_lines, open_lines

#: On the disk before the run goes on. Losing other lines costs a repeated delete.
_SYNCED = {"sending", "sent", "ended"}

_KINDS = {"sending", "sent", "unsent", "deleted", "gone", "ended"}

#: A run that was killed or lost SQS longer ago is not resumed, but followed by a new one, because
#: messages that come back after that time say little about the run. Its sends are still known.
_RESUMED_SECONDS = 3600


class NoJournal:
    """The journal of a run without a file. If the run is killed, the next can send twice.

    Attributes:
        path: the file; ``None`` = no file.
        past: messages that earlier processes left, by id: when it was first sent without an
            answer (seconds since the epoch). ``None``: SQS has it, and only the delete is left.
        sent_in_run: messages that the run which was killed has sent.
        last_at: when something was last sent; 0 = never.
        is_resumed: this process goes on with a run that was killed.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self.past: dict[str, float | None] = {}
        self.sent_in_run, self.last_at, self.is_resumed = 0, 0.0, False

    def write(self, kind: str, ids: Sequence[str], at: float = 0.0) -> None: ...


class Journal(NoJournal):
    """A journal in a file, which is resumed if it exists. Use as a context manager.

    When the next run opens the file, it drops the messages that an ended run has settled.

    Arguments:
        path: the file. It stays when the run is over; another run may go on with it.
        source: ARN of the queue; a journal is about one source.
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
        super().__init__()
        self.path, self._source = path, source
        self._lock = threading.Lock()
        self._file = open_lines(path, begins=b'{"source":', what="journal")
        try:
            self._read()
            if self._run is None and not self.past:
                self._file.truncate(0)
            is_old = now() - self.last_at > _RESUMED_SECONDS
            self.is_resumed = self._run is not None and not is_old
            self.run_id = self._run if self._run and self.is_resumed else run_id
            self.sent_in_run *= self.is_resumed
            self._append({"source": source, "run": self.run_id}, sync=True)
            _sync_directory(path)
        except BaseException as exc:  # an open file stays locked
            close_lines(self._file)
            if isinstance(exc, OSError):
                raise RedriveRefused(f"Cannot write journal {path}: {exc.strerror}.") from exc
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc: object) -> None:
        close_lines(self._file)

    def write(self, kind: str, ids: Sequence[str], at: float = 0.0) -> None:
        """Append a line. ``sending``, ``sent`` and ``ended`` are on the disk on return.

        Raises:
            OSError: the disk is full, for one.
        """
        if not ids and kind != "ended":
            return
        line: dict[str, object] = {"is": kind}
        if ids:
            line["ids"] = list(ids)
        if kind == "sending":
            line["at"] = at
        self._append(line, sync=kind in _SYNCED)

    def _append(self, line: dict[str, object], *, sync: bool) -> None:
        with self._lock:
            self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
            self._file.flush()
            if sync:
                os.fsync(self._file.fileno())

    def _read(self) -> None:
        self._run: str | None = None  # the run that was killed
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            try:
                self._apply(json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                raise RedriveRefused(
                    f"Line {number} of journal {self.path} is damaged, so what was sent is not"
                    " known. Without that line, what it was about may be sent twice."
                ) from None

    def _apply(self, line: dict[str, Any]) -> None:
        kind, ids = line.get("is"), line.get("ids", [])
        if not isinstance(ids, list) or not all(isinstance(id_, str) for id_ in ids):
            raise TypeError("ids")
        if kind is None:
            if line["source"] != self._source:
                raise RedriveRefused(
                    f"Journal {self.path} is of {line['source']}, not of {self._source}."
                )
            self.sent_in_run *= line["run"] == self._run
            self._run = str(line["run"])
        elif kind not in _KINDS:
            raise ValueError(kind)
        elif kind == "ended":
            self._run, self.sent_in_run = None, 0
        elif kind == "sending":
            self.last_at = max(self.last_at, float(line["at"]))
            for id_ in ids:
                self.past.setdefault(id_, float(line["at"]))
        elif kind == "sent":
            self.sent_in_run += sum(self.past.get(id_, 0.0) is not None for id_ in ids)
            self.past.update(dict.fromkeys(ids))
        else:
            for id_ in ids:
                self.past.pop(id_, None)


def _sync_directory(path: Path) -> None:
    """Put the file's name on the disk, too."""
    descriptor = os.open(path.resolve().parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
