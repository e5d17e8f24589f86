"""What tasks in worker processes leave behind for the test: a file with a JSON object per line."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Handler = TypeVar("Handler", bound=Callable[..., None])

RECORD_FILE_VARIABLE = "TEST_RECORD_FILE"


class Record:
    """A file that several processes append to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def env(self) -> dict[str, str]:
        """Return the environment in which :func:`note` writes to this record."""
        return {RECORD_FILE_VARIABLE: str(self.path)}

    def append(self, **entry: Any) -> None:
        """Add an entry, with ``at`` (one monotonic clock for the whole machine) and ``pid``."""
        line = json.dumps({"at": time.monotonic(), "pid": os.getpid(), **entry}) + "\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(descriptor, line.encode())  # one write: lines of two processes do not mix
        finally:
            os.close(descriptor)

    def entries(self, **wanted: Any) -> list[dict[str, Any]]:
        """Return the entries so far, oldest first, that have these values."""
        if not self.path.exists():
            return []
        entries = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [e for e in entries if wanted.items() <= e.items()]


def note(**entry: Any) -> None:
    """Append to the record of the test that has started this worker. Call it in a task."""
    Record(Path(os.environ[RECORD_FILE_VARIABLE])).append(**entry)


def connect_in_worker(signal: Any) -> Callable[[Handler], Handler]:
    """Connect a handler that notes something, but only in the worker of a test.

    The module of its tasks is imported by the process of the tests, too, where other tests run.
    """

    def connect(handler: Handler) -> Handler:
        if RECORD_FILE_VARIABLE in os.environ:
            signal.connect(handler, weak=False)
        return handler

    return connect
