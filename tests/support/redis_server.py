"""Run a Redis server for one test, on a Unix socket."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from .processes import eventually, stop


@contextmanager
def redis_server(directory: Path, *options: str) -> Iterator[Path]:
    """Run a Redis server on the socket ``redis.sock`` in a directory."""
    directory.mkdir(exist_ok=True)
    socket = directory / "redis.sock"
    command = ["redis-server", "--port", "0", "--save", "", "--unixsocket", str(socket), *options]
    server = subprocess.Popen(command, cwd=directory, stdout=subprocess.DEVNULL)
    try:
        eventually(lambda: _answers(socket))
        yield socket
    finally:
        stop(server)


def _answers(socket: Path) -> bool:
    try:
        return bool(redis.Redis(unix_socket_path=str(socket)).ping())
    except redis.RedisError:
        return False
