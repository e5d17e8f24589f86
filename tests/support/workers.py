"""Start real ``celery worker`` processes for tests, wait until they are ready, and end them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from .processes import eventually
from .worker_ready import READY_FILE_VARIABLE, READY_MODULE

ROOT = Path(__file__).parents[2]


class Worker:
    """A running worker, with its process and the file with its log."""

    def __init__(self, process: subprocess.Popen[bytes], log_file: Path) -> None:
        self.process = process
        self.log_file = log_file

    @property
    def pid(self) -> int:
        """The pid of the main process, which leads a process group of its own."""
        return self.process.pid

    @property
    def is_running(self) -> bool:
        """Whether the main process is running."""
        return self.process.poll() is None

    def log(self) -> str:
        """Return the worker's output so far, of stdout and stderr."""
        return self.log_file.read_text(errors="replace")

    def send(self, sig: signal.Signals) -> None:
        """Send a signal to the main process."""
        self.process.send_signal(sig)

    def stop(self, sig: signal.Signals = signal.SIGTERM, *, timeout: float = 30.0) -> int:
        """Signal the main process and return its exit code, or fail after ``timeout`` seconds."""
        if self.is_running:
            self.send(sig)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"the worker did not end within {timeout:g} s of {sig.name}:\n{self.log()}"
            ) from None

    def kill(self) -> None:
        """Send SIGKILL to the whole process group, and wait for the main process to end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def worker(
    app: str,
    *,
    pool: str = "prefork",
    concurrency: int = 2,
    loglevel: str = "INFO",
    queues: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    include: Sequence[str] = (),
    log_file: Path | None = None,
    cwd: Path = ROOT,
    start_timeout: float = 120.0,
    stop_timeout: float = 10.0,
) -> Iterator[Worker]:
    """Run ``celery -A app worker``, and yield the worker when it is ready to receive.

    Args:
        app: the app for ``celery -A``. Celery looks it up from ``cwd``, by default the checkout.
        queues: the queues for ``-Q``. Without any, the worker uses the app's own queues.
        env: variables to add to the environment of this process.
        options: more options of ``celery worker``, but not ``--include``, which Celery takes once.
        include: modules that the worker imports.
        log_file: the file for its output. With None, the output is lost after the block.
        start_timeout: the worker must be ready within these seconds.
        stop_timeout: at the end of the block, the worker gets SIGTERM if it is still running. If it
            runs for these seconds more, it and its pool processes get SIGKILL.
    """
    with tempfile.TemporaryDirectory(prefix="worker-") as directory:
        log_file = log_file or Path(directory) / "log"
        ready_file = Path(directory) / "ready"
        with log_file.open("wb") as output:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "celery", "-A", app, "worker"),
                    *("--pool", pool, "--concurrency", str(concurrency), "--loglevel", loglevel),
                    *("--hostname", f"test-{uuid4().hex[:8]}@%h"),
                    *("--include", ",".join([READY_MODULE, *include])),
                    *("--without-gossip", "--without-mingle", "--without-heartbeat"),
                    *(("--queues", ",".join(queues)) if queues else ()),
                    *options,
                ],
                cwd=cwd,
                env=os.environ
                | {
                    "PYTHONPATH": os.pathsep.join(
                        filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
                    )
                }
                | {READY_FILE_VARIABLE: str(ready_file)}
                | dict(env or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        running = Worker(process, log_file)
        try:
            eventually(
                lambda: ready_file.exists() or not running.is_running,
                timeout=start_timeout,
                message=lambda: f"the worker is not ready:\n{running.log()}",
            )
            if not running.is_running:
                raise AssertionError(f"the worker ended, {process.returncode}:\n{running.log()}")
            yield running
        finally:
            with contextlib.suppress(AssertionError):
                running.stop(timeout=stop_timeout)
            running.kill()
