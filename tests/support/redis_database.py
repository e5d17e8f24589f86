"""A Redis database for this test process alone, while other test runs use the same server."""

from __future__ import annotations

import fcntl
import os
import tempfile
from functools import cache
from pathlib import Path

#: Redis has 16 databases by default. Number 0 is the default of other programs, and the benchmarks
#: empty number 12.
_NUMBERS = sorted(set(range(1, 16)) - {12})

#: Names the database to this process's children, which use it too: "gw0 5".
_VARIABLE = "TEST_REDIS_DATABASE"

#: Open files, each with the lock on one database. The system frees them when the process ends.
_locks: list[int] = []


@cache
def _database() -> int:
    process = os.environ.get("PYTEST_XDIST_WORKER", "main")
    owner, _, inherited = os.environ.get(_VARIABLE, "").partition(" ")
    if owner == process:
        return int(inherited)
    directory = Path(tempfile.gettempdir()) / "celery-sqs-backoff-redis"
    directory.mkdir(exist_ok=True)
    for number in _NUMBERS:
        lock = os.open(directory / str(number), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        _locks.append(lock)
        os.environ[_VARIABLE] = f"{process} {number}"
        return number
    raise RuntimeError("all Redis databases for tests are in use by test processes")


def redis_url() -> str:
    """Return the URL of a Redis database that no other test process uses while this one lives.

    Tests of one process share it: a test that needs it empty empties it first.

    Raises:
        RuntimeError: other test processes hold all databases.
    """
    return f"redis://127.0.0.1:6379/{_database()}"
