"""Fixtures for all tests: servers, queues, and a clean state before each test."""

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

# Hypothesis tries the same examples in each run. So a test that begins to fail does so because the
# code has changed. With HYPOTHESIS_PROFILE=explore, it tries other and more examples.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, max_examples=2_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

if "mix_stderr" in inspect.signature(CliRunner).parameters:  # click before 8.2
    CliRunner.__init__ = partialmethod(CliRunner.__init__, mix_stderr=False)  # type: ignore[method-assign]
    Result.output = property(lambda self: self.stdout + self.stderr)  # type: ignore[method-assign]

_SERVICES = {"redis": 6379, "rabbitmq": 5672}


def pytest_configure(config: pytest.Config) -> None:
    """Restore SIGINT and SIGHUP, so that tests of signals also work in a background job.

    A shell makes its background jobs ignore SIGINT, and nohup makes a job ignore SIGHUP. Processes
    that a test starts would inherit this.
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
            [why] = again.args  # the mark must give a reason
            assert why
            item.add_marker(pytest.mark.flaky(reruns=1))
        if "sqs_endpoint" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.server)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Before the first test, say if the SQS server costs money. Stop if there is no server."""
    if any(item.get_closest_marker("server") for item in session.items):
        try:
            if said := before_the_first_call():
                session.config.get_terminal_writer().line(f"\n{said}")
        except RuntimeError as exc:
            raise pytest.UsageError(str(exc)) from None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test if its service does not run. In CI, fail it, because skips go unread there."""
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
    """Fail the run if a test has left a process behind. All fixtures are torn down by now."""
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
    """Show why a test first failed and was repeated. That it passed later may hide a fault."""
    for report in terminalreporter.getreports("rerun"):
        terminalreporter.section(f"repeated: {report.nodeid}")
        terminalreporter.line(report.longreprtext)


@pytest.fixture(autouse=True)
def no_django_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide ``DJANGO_SETTINGS_MODULE``, which another test may have set, from a test's processes."""
    monkeypatch.delenv("DJANGO_SETTINGS_MODULE", raising=False)


@pytest.fixture(autouse=True)
def root_log_level() -> Iterator[None]:
    """Undo changes that an earlier test made to logging, for example with a worker in a thread."""
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
    """Empty Celery's memory backend. All apps share it, and the next test may use the same IDs."""
    yield
    cache_backend._DUMMY_CLIENT_CACHE.clear()


@pytest.fixture(autouse=True)
def results_may_be_waited_for() -> Iterator[None]:
    """Let the next test wait for a result. A worker in this process forbids this to all tasks."""
    yield
    _state._set_task_join_will_block(False)


@contextmanager
def _tasks_of_other_apps() -> Iterator[None]:
    """Forget the tasks that the apps of this block share with all later apps.

    By default, ``@app.task`` adds a task to each app that is finalized later. If a later test
    defines a task of the same name, Celery would keep the old task and not register the new one.
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
    """The URL of an SQS server. It is ministack's by default.

    ``SQS_SERVER`` or ``SQS_ENDPOINT`` can name another server.
    """
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    with ExitStack() as stack:
        yield stack.enter_context(sqs_server())
        with capture.global_and_fixture_disabled():  # show what the server says when it stops
            stack.close()


@pytest.fixture(scope="session")
def sqs(sqs_endpoint: str) -> SQSClient:
    """A boto3 client of ``sqs_endpoint``."""
    return sqs_client(sqs_endpoint)


@pytest.fixture
def make_queue(sqs: SQSClient) -> Iterator[Callable[..., LocalQueue]]:
    """Yield a function that makes a queue on ``sqs_endpoint``, by default with a dead-letter queue.

    It takes the options of ``create_local_queue``.
    """
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
    """A standard queue with a dead-letter queue, on ``sqs_endpoint``."""
    return make_queue()


@pytest.fixture(scope="session")
def _proxy(sqs_endpoint: str) -> Iterator[FaultProxy]:
    with fault_proxy(sqs_endpoint) as proxy:
        yield proxy


@pytest.fixture
def proxy(_proxy: FaultProxy) -> Iterator[FaultProxy]:
    """A fault proxy in front of ``sqs_endpoint``, at first without faults, latency and counts."""
    _proxy.heal()
    _proxy.set_latency(0)
    _proxy.record()
    _proxy.reset()
    yield _proxy
    _proxy.heal()


@pytest.fixture
def proxied_sqs(proxy: FaultProxy) -> SQSClient:
    """A boto3 client that calls SQS through ``proxy``, and does not retry by itself."""
    return sqs_client(
        proxy.endpoint, retries={"total_max_attempts": 1}, connect_timeout=5, read_timeout=5
    )


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """A record in which tasks of worker processes note what happened.

    The test passes ``record.env`` to the worker.
    """
    return Record(tmp_path / "record")
