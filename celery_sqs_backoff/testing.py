"""Pytest fixtures for a project's own tests, with a local SQS and a real worker.

Install ``celery-sqs-backoff[testing]`` and name this module in the top ``conftest.py``::

    pytest_plugins = ["celery_sqs_backoff.testing"]

A complete test, in which the provider fails once, and the task keeps its message and is retried::

    from celery_sqs_backoff import Schedule, SQSBackoffTask

    class MailProviderDown(Exception):
        pass

    def test_a_mail_survives_an_outage(sqs_celery_app, sqs_worker):
        answers = iter([MailProviderDown(), "accepted"])

        @sqs_celery_app.task(
            base=SQSBackoffTask, retry_on=(MailProviderDown,), backoff=Schedule([1])
        )
        def send_email(customer_id):
            answer = next(answers)
            if isinstance(answer, Exception):
                raise answer
            return answer

        with sqs_worker():
            assert send_email.delay(7).get(timeout=60) == "accepted"

``@shared_task`` tasks (the usual form in Django projects) belong to ``sqs_celery_app`` while a test
uses that fixture. If your tasks belong to an app of your own, move that app to the local SQS. To do
so, override the fixture in ``conftest.py``::

    from celery_sqs_backoff.testing import on_local_sqs
    from myproject.celery import app

    @pytest.fixture
    def sqs_celery_app(sqs_server, sqs_queue):
        with on_local_sqs(app, sqs_server, sqs_queue):
            yield app

The fixture ``provider_proxy`` makes an HTTP provider fail as you choose. See
``celery_sqs_backoff.provider_proxy``.

The local SQS is `moto <https://docs.getmoto.org>`_, in this process. It is made for small queues
(up to some hundred messages) and differs from SQS. Concurrent receives can return duplicates. A
message older than 12 hours cannot be hidden again. A long poll of a FIFO queue does not return
early. The fixtures read no credentials, profiles or broker URLs from the environment.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from uuid import uuid4

import boto3
from botocore.config import Config
from celery import Celery
from celery.contrib.testing.app import setup_default_app
from celery.contrib.testing.worker import start_worker
from celery.signals import setup_logging
from kombu.transport.SQS import Channel

from .provider_proxy import ProviderProxy, running_provider_proxy
from .store.memory import MemoryStore

_INSTALL = "celery_sqs_backoff.testing needs {}: pip install 'celery-sqs-backoff[testing]'"

try:
    import pytest
except ImportError as exc:
    raise ImportError(_INSTALL.format("pytest")) from exc

if TYPE_CHECKING:
    from celery.worker import WorkController
    from mypy_boto3_sqs.client import SQSClient

__all__ = [
    "LocalQueue",
    "LocalQueueFactory",
    "create_local_queue",
    "local_sqs_client",
    "local_sqs_settings",
    "on_local_sqs",
    "provider_proxy",
    "running_worker",
    "sqs_celery_app",
    "sqs_client",
    "sqs_queue",
    "sqs_queue_factory",
    "sqs_server",
    "sqs_worker",
]

REGION = "us-east-1"
ACCESS_KEY = SECRET_KEY = "testing"


@dataclass(frozen=True, kw_only=True)
class LocalQueue:
    """A queue on the local SQS. ``dlq``: its dead-letter queue; ``None`` = it has no such queue."""

    name: str
    url: str
    arn: str
    dlq: LocalQueue | None = None


#: The function that the fixture ``sqs_queue_factory`` returns.
LocalQueueFactory = Callable[..., LocalQueue]


def local_sqs_client(endpoint_url: str, **config: Any) -> SQSClient:
    """Return a boto3 client of a local SQS. ``config`` has arguments of botocore's ``Config``."""
    session = boto3.Session(
        region_name=REGION, aws_access_key_id=ACCESS_KEY, aws_secret_access_key=SECRET_KEY
    )
    return session.client("sqs", endpoint_url=endpoint_url, config=Config(**config))


def create_local_queue(
    client: SQSClient,
    *,
    name: str | None = None,
    fifo: bool = False,
    visibility_timeout_seconds: int = 30,
    dead_letter_queue: bool = True,
    max_receive_count: int = 10,
    attributes: Mapping[str, str] | None = None,
) -> LocalQueue:
    """Create a queue, by default with a dead-letter queue.

    Args:
        client: a client of the server on which to create the queue.
        name: name of the queue. Default: a new, unique name. A FIFO queue gets the suffix ``.fifo``
            that SQS requires. The dead-letter queue's name has ``-dlq`` added.
        fifo: ``True`` = create the queue and its dead-letter queue as FIFO queues, with
            deduplication by content. Default ``False``.
        visibility_timeout_seconds: 0 to 43,200. Default 30, as in SQS.
        dead_letter_queue: ``False`` = no dead-letter queue and no redrive policy. Default ``True``.
        max_receive_count: number of receives, 1 to 1,000, after which SQS itself moves a message to
            the dead-letter queue. Default 10, as in SQS.
        attributes: further attributes of the queue and of its dead-letter queue, such as
            ``{"DelaySeconds": "5"}``.
    """
    stem = (name or f"test-{uuid4().hex}").removesuffix(".fifo")
    suffix = ".fifo" if fifo else ""
    common = dict(attributes or {})
    if fifo:
        common |= {"FifoQueue": "true", "ContentBasedDeduplication": "true"}
    own = {"VisibilityTimeout": str(visibility_timeout_seconds)}
    dlq = None
    if dead_letter_queue:
        dlq = _create(client, f"{stem}-dlq{suffix}", common)
        own["RedrivePolicy"] = (
            f'{{"deadLetterTargetArn": "{dlq.arn}", "maxReceiveCount": "{max_receive_count}"}}'
        )
    return _create(client, f"{stem}{suffix}", common | own, dlq=dlq)


def _create(
    client: SQSClient, name: str, attributes: Mapping[str, str], dlq: LocalQueue | None = None
) -> LocalQueue:
    url = client.create_queue(QueueName=name, Attributes=dict(attributes))["QueueUrl"]  # type: ignore[arg-type]
    answer = client.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])
    return LocalQueue(name=name, url=url, arn=answer["Attributes"]["QueueArn"], dlq=dlq)


def local_sqs_settings(endpoint_url: str, *queues: LocalQueue) -> dict[str, Any]:
    """Return Celery settings for an app that uses only these queues.

    The first queue is the app's default queue. All the queues are in ``predefined_queues``, so a
    send to another queue raises kombu's ``UndefinedQueueException`` and creates no queue.
    """
    broker_url = f"sqs://{ACCESS_KEY}:{SECRET_KEY}@{urlsplit(endpoint_url).netloc}//"
    return {
        "broker_url": broker_url,
        "broker_read_url": broker_url,
        "broker_write_url": broker_url,
        "broker_transport_options": {
            "region": REGION,
            "is_secure": urlsplit(endpoint_url).scheme == "https",
            # Make no long polls, because the server continues a poll even if its worker has
            # stopped. Such a poll would receive the next message, which would then stay hidden for
            # its whole visibility timeout.
            "wait_time_seconds": 0,
            "polling_interval": 0.05,
            "predefined_queues": {queue.name: {"url": queue.url} for queue in queues},
        },
        "task_default_queue": queues[0].name,
        "task_always_eager": False,
        "result_backend": "cache+memory://",
        # The worker runs in the process of pytest, which handles logging and output itself.
        "worker_hijack_root_logger": False,
        "worker_redirect_stdouts": False,
    }


@contextmanager
def on_local_sqs(app: Celery, endpoint_url: str, *queues: LocalQueue) -> Iterator[Celery]:
    """Move a Celery app to these queues, and make it the current app, until the block ends.

    In Celery, environment variables such as ``CELERY_BROKER_URL`` override an app's settings. The
    block removes these variables, because a test must not reach a real broker.

    The app gets a new store in memory, so that tests do not share guards, steps and locks. If a
    test needs another store, set ``app.conf.sqs_backoff`` inside the block.
    """
    with pytest.MonkeyPatch.context() as patch, setup_default_app(app):
        for kind in ("BROKER", "BROKER_READ", "BROKER_WRITE"):
            patch.delenv(f"CELERY_{kind}_URL", raising=False)
        patch.delenv("CELERY_RESULT_BACKEND", raising=False)
        patch.delenv("TEST_BROKER", raising=False)  # read by celery.contrib.testing
        settings = local_sqs_settings(endpoint_url, *queues)
        app.conf.get("broker_url")  # Celery replaces ``conf`` at the first read, so read it first
        # Records of another test, or of a real store, must not affect this test.
        settings["sqs_backoff"] = {**(app.conf.get("sqs_backoff") or {}), "store": MemoryStore()}
        for name, value in settings.items():
            patch.setitem(app.conf.changes, name, value)
        _forget_connections(app)
        app.set_default()
        app.set_current()
        try:
            yield app
        finally:
            _forget_connections(app)


def _forget_connections(app: Celery) -> None:
    """Drop the app's cached broker connections, queues and result backend."""
    app.close()
    app.__dict__.pop("amqp", None)
    app._backend_cache = None
    app._local.backend = None


@contextmanager
def running_worker(
    app: Celery,
    *,
    pool: str = "solo",
    **options: Any,
) -> Iterator[WorkController]:
    """Run a real worker on an app, in a thread of this process, until the block ends.

    Args:
        app: an app inside :func:`on_local_sqs`. Define all its tasks before the worker starts,
            because the worker does not find later tasks.
        pool: ``"solo"`` (default) or ``"threads"``. Other pools need a process of their own.
        options: as for ``celery.contrib.testing.worker.start_worker``, such as ``concurrency=2``
            and ``shutdown_timeout=30``, and for ``celery.worker.WorkController``.

    Raises:
        ValueError: ``pool`` is not ``"solo"`` or ``"threads"``.
        RuntimeError: a task was still running ``shutdown_timeout`` seconds after the block.
    """
    if pool not in ("solo", "threads"):
        raise ValueError(f"invalid pool {pool!r}: expected 'solo' or 'threads'")
    options.setdefault("queues", list(app.conf.broker_transport_options["predefined_queues"]))
    setup_logging.connect(_leave_logging_alone)
    others = set(threading.enumerate())
    try:
        with start_worker(app, pool=pool, perform_ping_check=False, **options) as worker:
            yield worker
    finally:
        setup_logging.disconnect(_leave_logging_alone)
        # A receive call that is still running could receive a message of the next test. So wait for
        # the thread that makes the call. The call ends soon, because it is no long poll.
        for thread in set(threading.enumerate()) - others:
            if thread.name.startswith("sqs-poll-"):
                thread.join(timeout=5)
        # kombu before 5.7 shares these clients between channels. They are bound to the event loop
        # of the worker that has ended, so the next worker must not use them.
        clients = Channel._predefined_queue_async_clients
        if isinstance(clients, dict):
            clients.clear()


def _leave_logging_alone(**_: object) -> None:
    """Do nothing. Celery does not set up logging if a function is connected to ``setup_logging``.

    Celery's set-up would stay in effect after the worker has ended.
    """


@pytest.fixture(scope="session")
def sqs_server() -> Iterator[str]:
    """Start a local SQS in this process, on a free port of 127.0.0.1. Return its endpoint URL.

    All tests of the session share the server. Each test has queues of its own.
    """
    try:  # import moto only here, because the import is slow, and not all tests need SQS
        from moto.server import ThreadedMotoServer
    except ImportError as exc:
        raise ImportError(_INSTALL.format("moto")) from exc
    requests_log = logging.getLogger("werkzeug")
    level = requests_log.level
    requests_log.setLevel(logging.WARNING)  # omit the server's log line for each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()
    requests_log.setLevel(level)


@pytest.fixture(scope="session")
def sqs_client(sqs_server: str) -> SQSClient:
    """Return a boto3 client of the local SQS."""
    return local_sqs_client(sqs_server)


@pytest.fixture
def sqs_queue_factory(sqs_client: SQSClient) -> Iterator[LocalQueueFactory]:
    """Return a function that creates queues, which are deleted after the test.

    The function takes the arguments of :func:`create_local_queue` except ``client``.
    """
    made: list[LocalQueue] = []

    def create(**options: Any) -> LocalQueue:
        made.append(create_local_queue(sqs_client, **options))
        return made[-1]

    yield create
    for queue in made:
        sqs_client.delete_queue(QueueUrl=queue.url)
        if queue.dlq is not None:
            sqs_client.delete_queue(QueueUrl=queue.dlq.url)


@pytest.fixture
def sqs_queue(sqs_queue_factory: LocalQueueFactory) -> LocalQueue:
    """Create a standard queue with a dead-letter queue for one test."""
    return sqs_queue_factory()


@pytest.fixture
def sqs_celery_app(sqs_server: str, sqs_queue: LocalQueue) -> Iterator[Celery]:
    """Create a Celery app on ``sqs_queue``, and make it the current app during the test."""
    with on_local_sqs(Celery("sqs_tests", set_as_current=False), sqs_server, sqs_queue) as app:
        yield app


@pytest.fixture
def sqs_worker(sqs_celery_app: Celery) -> Callable[..., AbstractContextManager[WorkController]]:
    """Return a function that runs a worker on ``sqs_celery_app``, in ``with sqs_worker():``.

    The function takes the arguments of :func:`running_worker` except ``app``.
    """
    return partial(running_worker, sqs_celery_app)


@pytest.fixture
def provider_proxy() -> Iterator[Callable[[str], ProviderProxy]]:
    """Return ``provider_proxy(upstream)``, a function that starts a proxy which injects faults."""
    with ExitStack() as stack:
        yield lambda upstream: stack.enter_context(running_provider_proxy(upstream))
