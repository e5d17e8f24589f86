"""Find a Redis database for this test process alone. Other test runs may use the same server."""

from __future__ import annotations

import fcntl
import os
import tempfile
from functools import cache
from pathlib import Path

#: The databases that tests may use. Redis has 16 by default. Other programs use number 0 by
#: default, and the benchmarks empty number 12.
_NUMBERS = sorted(set(range(1, 16)) - {12})

#: This variable names the test process and its database, such as "gw0 5". Children of the process
#: inherit the variable, and use the same database.
_VARIABLE = "TEST_REDIS_DATABASE"

#: Descriptor of the file whose lock reserves the database. The system releases the lock when the
#: process ends.
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
    """Return the URL of a Redis database that no other test process uses while this one runs.

    All tests of this process share the database. A test that needs it empty must empty it first.

    Raises:
        RuntimeError: other test processes hold all databases.
    """
    return f"redis://127.0.0.1:6379/{_database()}"
