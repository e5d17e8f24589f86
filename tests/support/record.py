"""Let tasks in worker processes note what happens, for the test to read.

The notes are in a file, as one JSON object per line.
"""

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
    """A file to which several processes append entries."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def env(self) -> dict[str, str]:
        """Return the environment in which :func:`note` writes to this record."""
        return {RECORD_FILE_VARIABLE: str(self.path)}

    def append(self, **entry: Any) -> None:
        """Add an entry with the time ``at``, on the machine's monotonic clock, and the ``pid``."""
        line = json.dumps({"at": time.monotonic(), "pid": os.getpid(), **entry}) + "\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            # Write the line with one call, so that the lines of two processes do not mix.
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def entries(self, **wanted: Any) -> list[dict[str, Any]]:
        """Return the entries that have these values, oldest first."""
        if not self.path.exists():
            return []
        entries = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [e for e in entries if wanted.items() <= e.items()]


def note(**entry: Any) -> None:
    """Add an entry to the record of the test that has started this worker. Tasks call this."""
    Record(Path(os.environ[RECORD_FILE_VARIABLE])).append(**entry)


def connect_in_worker(signal: Any) -> Callable[[Handler], Handler]:
    """Connect a signal handler that notes something, but only in the worker of a test.

    The process of the tests imports the same module. There the handler must not run, because other
    tests also send the signal.
    """

    def connect(handler: Handler) -> Handler:
        if RECORD_FILE_VARIABLE in os.environ:
            signal.connect(handler, weak=False)
        return handler

    return connect
