"""A command whose output cannot be written still ends with the right exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from celery import Celery

from celery_sqs_backoff.commands import exit_codes

app = Celery("printing", broker="sqs://", set_as_current=False)


@contextmanager
def closed_pipe() -> Iterator[int]:
    read, write = os.pipe()
    os.close(read)
    try:
        yield write
    finally:
        os.close(write)


@contextmanager
def full_disk() -> Iterator[int]:
    with Path("/dev/full").open("wb") as full:
        yield full.fileno()


def run(stdout: int, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "celery", "-A", __name__, *arguments],
        env={**os.environ, "PYTHONUNBUFFERED": ""},  # Python writes its buffer when it ends
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stderr


def test_full_disk(tmp_path):
    """``sqs-health`` reports a healthy worker even if the disk is full.

    A probe that writes its output to a file would otherwise restart a healthy worker.
    """
    heartbeat = tmp_path / "heartbeat"
    heartbeat.touch()
    with full_disk() as stdout:
        ended, _ = run(stdout, "sqs-health", "--file", str(heartbeat))
    assert ended == exit_codes.DONE
