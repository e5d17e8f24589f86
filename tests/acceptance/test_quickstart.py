"""The commands of the quickstart and of the page on Django print what the pages show."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest

from tests.unit.test_docs import ROOT, Block, tokens

#: Commands that go on running until the end of the page.
LASTING = ("moto_server", "celery -A shop worker", "celery -A mysite worker")

#: Commands that the test leaves out, because their packages are already installed.
INSTALLING = ("pip install",)

#: A command may take this long. Each starts a Python program, which is slow on a busy machine.
SECONDS = 120
pytestmark = pytest.mark.timeout(600)


class Terminal:
    """Run the commands of a page in a directory of its own, and compare what they print."""

    def __init__(self, home: Path, port: int) -> None:
        self._home, self._port = home, str(port)
        self._lasting: list[subprocess.Popen[bytes]] = []
        self._output = ""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "CELERY_", "DJ"))}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._environment = {**clean, "PATH": path, "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}

    def do(self, block: Block) -> None:
        code = block.code.replace("5000", self._port)
        if block.language == "console":
            for line in code.splitlines():
                self._type(line.removeprefix("$ "))
        elif block.language == "text":
            self._expect(code, log=f"{block.file}.log" if block.file else None)
        elif block.file:
            file = self._home / block.file
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as stream:  # a later block of the page extends the file
                stream.write(code)

    def _type(self, line: str) -> None:
        if line.startswith(INSTALLING):
            return
        words = shlex.split(line)
        if line.startswith(LASTING):
            log = "worker.log" if "worker" in words else "server.log"
            with (self._home / log).open("wb") as stream:
                self._lasting.append(
                    subprocess.Popen(
                        words,
                        cwd=self._home,
                        env=self._environment,
                        stdout=stream,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
            self._wait_for("ready" if log == "worker.log" else "Running on", log)
            return
        done = subprocess.run(
            words,
            cwd=self._home,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
        self._output = done.stdout
        assert done.returncode == 0, f"{line}\n{self._output}"

    def _expect(self, text: str, log: str | None) -> None:
        """Fail unless these lines were printed in this order, perhaps with others in between.

        ``...`` in a line stands for any text.
        """
        lines = [re.escape(line).replace(r"\.\.\.", ".*") for line in text.splitlines()]
        pattern = "^" + "$\n(?:.*\n)*?".join(lines) + "$"
        if log is None:
            assert re.search(pattern, self._output, re.M), f"{text}\nis not in\n{self._output}"
        else:
            self._wait_for(pattern, log)

    def _wait_for(self, pattern: str, log: str) -> None:
        until, shown = time.monotonic() + SECONDS, ""
        while time.monotonic() < until:
            shown = (self._home / log).read_text()
            if re.search(pattern, shown, re.M):
                return
            time.sleep(0.1)
        raise AssertionError(f"{pattern}\nis not in\n{shown}")

    def close(self) -> None:
        for program in reversed(self._lasting):
            os.killpg(program.pid, signal.SIGTERM)
            try:
                program.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(program.pid, signal.SIGKILL)
                program.wait()


@pytest.fixture
def terminal(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    terminal = Terminal(tmp_path, port)
    yield terminal
    terminal.close()


def blocks_of(page: str) -> Iterator[Block]:
    for token in tokens(ROOT / "docs" / page):
        if token.type == "fence":
            language, file, *_ = [*token.info.split(), "", ""]
            yield Block(language, file, 0, token.content)


def test_quickstart(terminal):
    """The quickstart shows a retry, a dead letter and the doctor, and needs only the package."""
    for block in blocks_of("quickstart.md"):
        terminal.do(block)


def test_django(terminal):
    """The page on Django works in a new Django project, on the SQS server of the quickstart."""
    queues = takewhile(lambda block: block.file != "shop.py", blocks_of("quickstart.md"))
    for block in [*queues, *blocks_of("django.md")]:
        terminal.do(block)
