"""Fixtures that all tests share: the servers they need, queues of their own, and no leftovers."""

from __future__ import annotations

import inspect
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partialmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import celery.app.builtins  # noqa: F401 - its tasks belong to every app
import pytest
from celery import _state
from celery.backends import cache as cache_backend
from click.testing import CliRunner, Result
from hypothesis import settings

from .lanes import SLOW_SECONDS, Lanes, seconds_of
from .support.fault_proxy import FaultProxy, fault_proxy
from .support.processes import children, eventually
from .support.queues import create_queue
from .support.record import Record
from .support.servers import before_the_first_call, sqs_client, sqs_server

if TYPE_CHECKING:
    from mypy_boto3_sqs.client import SQSClient

    from celery_sqs_backoff.testing import LocalQueue

pytest_plugins = ["celery_sqs_backoff.testing", "pytester"]

# The same examples each time, so that a red run is the change's fault. To look for others:
# HYPOTHESIS_PROFILE=explore
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, max_examples=2_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

if "mix_stderr" in inspect.signature(CliRunner).parameters:  # click before 8.2
    CliRunner.__init__ = partialmethod(CliRunner.__init__, mix_stderr=False)  # type: ignore[method-assign]
    Result.output = property(lambda self: self.stdout + self.stderr)  # type: ignore[method-assign]

_SERVICES = {"redis": 6379, "rabbitmq": 5672}


def pytest_configure(config: pytest.Config) -> None:
    """Let tests of signals work in a background job too.

    A shell ignores SIGINT for it, and nohup ignores SIGHUP. The tests' processes inherit both.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Lanes | None:
    return Lanes(config, log) if config.option.dist == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if seconds_of(item.nodeid) > SLOW_SECONDS:
            item.add_marker(pytest.mark.slow)
        if (again := item.get_closest_marker("rerun")) is not None:
            [why] = again.args  # no test is repeated without a reason
            assert why
            item.add_marker(pytest.mark.flaky(reruns=1))
        if "sqs_endpoint" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.server)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Say it before the first test, and once, when the server costs money or cannot be had."""
    if any(item.get_closest_marker("server") for item in session.items):
        try:
            if said := before_the_first_call():
                session.config.get_terminal_writer().line(f"\n{said}")
        except RuntimeError as exc:
            raise pytest.UsageError(str(exc)) from None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A missing service skips on a laptop and fails in CI, where nobody reads skips."""
    for marker, port in _SERVICES.items():
        if item.get_closest_marker(marker) and not _listens(port):
            give_up = pytest.fail if os.environ.get("CI") else pytest.skip
            give_up(f"needs {marker} on 127.0.0.1:{port}")


@cache
def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run when a test has left a process behind; by now all fixtures are torn down."""
    try:
        eventually(lambda: not _left_over(), timeout=2)
    except AssertionError:
        report = session.config.get_terminal_writer()
        report.line()
        report.line(f"child processes left running: {_left_over()}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _left_over() -> dict[int, str]:
    # multiprocessing's resource tracker lives as long as this process, by design
    return {pid: cmd for pid, cmd in children().items() if "resource_tracker" not in cmd}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say why a test was repeated: that it passed then may hide a fault."""
    for report in terminalreporter.getreports("rerun"):
        terminalreporter.section(f"repeated: {report.nodeid}")
        terminalreporter.line(report.longreprtext)


@pytest.fixture(autouse=True)
def no_django_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test starts must not find the settings that another test has named."""
    monkeypatch.delenv("DJANGO_SETTINGS_MODULE", raising=False)


@pytest.fixture(autouse=True)
def root_log_level() -> Iterator[None]:
    """Undo what a worker in a thread of the tests, or a set-up of logging, has changed for all."""
    level = logging.getLogger().level
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and name.startswith("celery"):
            logger.propagate, logger.disabled = True, False
            logger.setLevel(logging.NOTSET)
    logging.disable(logging.NOTSET)
    yield
    logging.getLogger().setLevel(level)


@pytest.fixture(autouse=True)
def results_in_memory() -> Iterator[None]:
    """Forget the results in memory, which all apps share; the next test may use the same ids."""
    yield
    cache_backend._DUMMY_CLIENT_CACHE.clear()


@pytest.fixture(autouse=True)
def results_may_be_waited_for() -> Iterator[None]:
    """Let the next test wait for a result; a worker in this process forbids it to all tasks."""
    yield
    _state._set_task_join_will_block(False)


@contextmanager
def _tasks_of_other_apps() -> Iterator[None]:
    """Forget the tasks that an app here shares with every app that is finalized after it.

    ``@app.task`` does so by default. A later test would find a task of that name, and its own
    would not be registered.
    """
    shared = _state._on_app_finalizers
    before = set(shared)
    yield
    shared.intersection_update(before)


@pytest.fixture(autouse=True, scope="module")
def tasks_of_a_module() -> Iterator[None]:
    with _tasks_of_other_apps():
        yield


@pytest.fixture(autouse=True)
def tasks_of_a_test(tasks_of_a_module: None) -> Iterator[None]:
    with _tasks_of_other_apps():
        yield


@pytest.fixture(scope="session")
def sqs_endpoint(pytestconfig: pytest.Config) -> Iterator[str]:
    """A fast and concurrent SQS: ministack, or what ``SQS_SERVER`` or ``SQS_ENDPOINT`` names."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    with ExitStack() as stack:
        yield stack.enter_context(sqs_server())
        with capture.global_and_fixture_disabled():  # what it says at the end is for people
            stack.close()


@pytest.fixture(scope="session")
def sqs(sqs_endpoint: str) -> SQSClient:
    """A boto3 client of ``sqs_endpoint``."""
    return sqs_client(sqs_endpoint)


@pytest.fixture
def make_queue(sqs: SQSClient) -> Iterator[Callable[..., LocalQueue]]:
    """Make queues on ``sqs_endpoint``, with a DLQ each, as ``create_local_queue`` does."""
    made: list[LocalQueue] = []

    def make(**options: Any) -> LocalQueue:
        made.append(create_queue(sqs, **options))
        return made[-1]

    yield make
    for queue in made:
        for url in (queue.url, *([queue.dlq.url] if queue.dlq else [])):
            sqs.delete_queue(QueueUrl=url)


@pytest.fixture
def queue(make_queue: Callable[..., LocalQueue]) -> LocalQueue:
    """A standard queue with a DLQ on ``sqs_endpoint``."""
    return make_queue()


@pytest.fixture(scope="session")
def _proxy(sqs_endpoint: str) -> Iterator[FaultProxy]:
    with fault_proxy(sqs_endpoint) as proxy:
        yield proxy


@pytest.fixture
def proxy(_proxy: FaultProxy) -> Iterator[FaultProxy]:
    """A fault proxy in front of ``sqs_endpoint``, without faults, latency or counts."""
    _proxy.heal()
    _proxy.set_latency(0)
    _proxy.record()
    _proxy.reset()
    yield _proxy
    _proxy.heal()


@pytest.fixture
def proxied_sqs(proxy: FaultProxy) -> SQSClient:
    """A boto3 client that goes through ``proxy``, and does not try again by itself."""
    return sqs_client(
        proxy.endpoint, retries={"total_max_attempts": 1}, connect_timeout=5, read_timeout=5
    )


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """Where tasks in worker processes note what happened; pass ``record.env`` to the worker."""
    return Record(tmp_path / "record")
