"""The progress of a redrive: a terminal shows one line of it, and a pipe none."""

import fcntl
import os
import struct
import sys
import termios
from contextlib import suppress

import pytest

from celery_sqs_backoff.commands.progress import show_progress
from celery_sqs_backoff.redrive.events import Failed, Progress, RunWaits, Started


def show(stderr):
    """Show the progress of a redrive that is half done and could not send one message."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        with show_progress() as on_event:
            on_event(Started("run", "dlq", messages=80, threads=1, journal="/tmp/j"))
            on_event(
                Progress(
                    looked_at=40, messages=80, sent=40, failed=0, skipped=0, poison=0, returned=0,
                    to_send=80, rate=10.0, eta_seconds=4.0,
                )
            )  # fmt: skip
            on_event(Failed(("id",), "too long"))
            on_event(RunWaits(messages=35, seconds=95.0))


def show_on_terminal(columns):
    master, slave = os.openpty()
    try:
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        with open(slave, "w") as stderr:
            show(stderr)
        shown = b""
        with suppress(OSError):  # the other end is closed
            while read := os.read(master, 4_096):
                shown += read
        return shown.decode()
    finally:
        os.close(master)


FACTS = "40/80 10.0/s failed 0 came back 0 4 s left"


@pytest.mark.parametrize("columns", [80, 50])
def test_one_line(columns):
    """A terminal shows one line with counts, rate and time left, no wider than the terminal.

    After any other output, such as a failure, the line is drawn again below it.
    """
    drawn = show_on_terminal(columns).split("\r")
    assert {text for text in drawn if text.strip() and len(text) == columns - 1} == {
        f"{FACTS:{columns - 1}}"
    }
    assert [text for text in drawn if "failed (" in text] == ["failed (too long): id"]
    assert drawn[-1] == "\n"


def test_terminal_without_size():
    """A terminal that reports no size shows failures, but no progress.

    Some containers and serial lines have no size. A line of progress would raise ValueError there.
    """
    assert "failed (too long): id" in show_on_terminal(0)


def test_pipe(tmp_path):
    """A pipe gets other output, but no progress.

    The log of a job would get one line per second.
    """
    with (tmp_path / "err").open("w") as stderr:
        show(stderr)
    assert (tmp_path / "err").read_text().splitlines() == [
        "journal: /tmp/j",
        "failed (too long): id",
        "waiting for 35 hidden messages, for up to 1 min 35 s",
    ]
