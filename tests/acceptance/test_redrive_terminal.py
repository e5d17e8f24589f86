"""``celery sqs-redrive`` on a terminal that is narrow, or that the user closes."""

from __future__ import annotations

import fcntl
import json
import os
import re
import struct
import subprocess
import sys
import termios
import threading
from collections import Counter

import pytest

from tests.integration.redrive_stage import RedriveStage
from tests.support.processes import eventually

from .stage import app_of_this_module

app = app_of_this_module()

COLUMNS = 50


class Terminal:
    """A process with a terminal of its own. ``text`` is all that it has printed."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        self.text = ""
        self.process = subprocess.Popen(
            command,
            env=env | {"TERM": "xterm"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self.slave = slave
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                found = os.read(self.master, 4_096)
            except OSError:
                return
            if not found:
                return
            self.text += found.decode(errors="replace")

    def hang_up(self) -> None:
        os.close(self.slave)
        os.close(self.master)


@pytest.fixture
def stage(sqs, sqs_endpoint, queue):
    return RedriveStage(sqs, sqs_endpoint, queue)


@pytest.fixture
def terminal(stage, tmp_path):
    made = []

    def start(*arguments):
        names = ("broker_url", "broker_transport_options", "task_default_queue")
        settings = json.dumps({name: stage.app.conf[name] for name in names})
        env = os.environ | {"TEST_APP_SETTINGS": settings, "XDG_STATE_HOME": str(tmp_path)}
        command = [*(sys.executable, "-m", "celery", "-A", __name__, "sqs-redrive"), *arguments]
        made.append(Terminal([*command, stage.dlq.name], env))
        return made[-1]

    yield start
    for each in made:
        each.process.kill()
        each.process.wait()


def test_bar_keeps_counts(stage, terminal):
    """The progress bar of a redrive shows its counts in full on a terminal of 50 columns."""
    bodies = stage.fill_numbered(80)
    shown = terminal("--yes", "--rate", "30/s")
    assert shown.process.wait(60) == 0
    eventually(lambda: "80 of 80 sent." in shown.text, timeout=10, message=lambda: shown.text)
    assert re.search(r"80/80 \d+\.\d/s failed 0 came back 0", shown.text), "the counts are cut"
    assert stage.bodies(stage.queue) == Counter(bodies)


def test_terminal_hangs_up(stage, terminal):
    """A redrive loses no message when its terminal hangs up."""
    bodies = stage.fill_numbered(100)
    shown = terminal("--yes", "--rate", "10/s")
    eventually(
        lambda: re.search(r"[1-9]\d*/100 ", shown.text), timeout=60, message=lambda: shown.text
    )
    shown.hang_up()
    assert shown.process.wait(60) != 0
    left, moved = stage.bodies(stage.dlq), stage.bodies(stage.queue)
    assert left + moved == Counter(bodies), "the redrive has not given its messages back"
    assert 0 < sum(moved.values()) < 100
