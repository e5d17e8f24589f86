"""Start the programs that the demo needs, and end all of them when the demo ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

#: How long a program may take to end before it is killed.
STOP_TIMEOUT_SECONDS = 8.0

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)


class DemoError(Exception):
    """The demo cannot go on. The message says why."""


@dataclass(frozen=True)
class Program:
    """A child process, and the file with its output."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def first_line(self) -> str:
        """Return the first line of its output, or an empty string until it is complete."""
        line, newline, _ = self.output().partition("\n")
        return line if newline else ""

    def failure(self) -> DemoError:
        tail = "\n".join(self.output().splitlines()[-15:])
        return DemoError(f"{self.name} ended with exit code {self.process.returncode}:\n{tail}")


class Programs:
    """Child processes. All of them end at the end of the ``with`` block, even after an error."""

    def __init__(self, logs: Path, *, stop_with: signal.Signals = signal.SIGTERM) -> None:
        self._logs = logs
        self._stop_with = stop_with
        self._running: list[Program] = []

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self, name: str, *arguments: str, env: Mapping[str, str] | None = None) -> Program:
        """Run ``python -m <arguments>`` with its output in ``<name>.log``."""
        log = self._logs / f"{name}.log"
        with log.open("wb") as output, _signals_held_back():
            process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                env={**_environment(), **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # In a session of its own, a child gets no Ctrl-C. The demo gets it, and ends its
                # children. The demo can also kill a worker together with its pool processes.
                start_new_session=True,
            )
            self._running.append(Program(name, process, log))
        return self._running[-1]

    def check(self) -> None:
        """Raise DemoError if a program has failed."""
        for program in self._running:
            if program.process.poll():  # None if it is running, 0 if it has done its work
                raise program.failure()

    def finish(self, program: Program) -> None:
        """Wait until a program has done its work.

        Raises:
            DemoError: the program has failed.
        """
        if program.process.wait() != 0:
            raise program.failure()
        self._running.remove(program)

    def wait_for(self, condition: Callable[[], T], what: str, *, timeout: float = 30.0) -> T:
        """Return the first true value of ``condition()``.

        Raises:
            DemoError: there is none within ``timeout`` seconds, or a program has failed.
        """
        deadline = time.monotonic() + timeout
        while not (value := condition()):
            self.check()
            if time.monotonic() > deadline:
                raise DemoError(f"{what}: not within {timeout:g} s")
            time.sleep(0.05)
        return value

    def stop(self) -> None:
        """Signal all programs to end, and kill those that run after STOP_TIMEOUT_SECONDS."""
        with _signals_held_back():
            for program in self._running:
                program.process.send_signal(self._stop_with)
            deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
            for program in self._running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    program.process.wait(max(0.0, deadline - time.monotonic()))
                # This ends any process that the program has started and left running.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(program.process.pid, signal.SIGKILL)
                program.process.wait()
            self._running.clear()


def end_on_signals(*, deadline_seconds: int | None = None) -> None:
    """Raise an exception at SIGTERM, SIGHUP and the deadline, as Python does at Ctrl-C."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    def too_late(number: int, frame: object) -> None:
        raise DemoError(f"not finished within {deadline_seconds} s")

    # A shell makes its background jobs ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGHUP, end)
    if deadline_seconds is not None:
        signal.signal(signal.SIGALRM, too_late)
        signal.alarm(deadline_seconds)


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Deliver signals that end the demo only after the block, so that no child is half started."""
    held_back: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, frame: held_back.append(number))
        for number in _ENDING_SIGNALS
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for pending in held_back:
            signal.raise_signal(signal.Signals(pending))


def _environment() -> dict[str, str]:
    """Return the environment without variables that name a real AWS account, broker or proxy."""
    ours = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AWS_", "CELERY_", "DJANGO_"))
    }
    return ours | {
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
        "DJANGO_SETTINGS_MODULE": "example_project.settings",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
