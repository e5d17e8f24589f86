"""Pytest fixtures for a project's own tests: an SQS on this machine and a real worker on it.

Install ``celery-sqs-backoff[testing]`` and name this module in the top ``conftest.py``::

    pytest_plugins = ["celery_sqs_backoff.testing"]

A complete test: the provider is down once, the task keeps its message and comes back::

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

``@shared_task`` tasks (the usual form in Django projects) belong to ``sqs_celery_app`` while a
test uses it. Tasks of an app of your own need that app moved to the local SQS, by overriding the
fixture in ``conftest.py``::

    from celery_sqs_backoff.testing import on_local_sqs
    from myproject.celery import app

    @pytest.fixture
    def sqs_celery_app(sqs_server, sqs_queue):
        with on_local_sqs(app, sqs_server, sqs_queue):
            yield app

A provider over HTTP that fails as you say is the fixture ``provider_proxy``; see
``celery_sqs_backoff.provider_proxy``.

The local SQS is `moto <https://docs.getmoto.org>`_, in this process. It is made for small queues
(up to some hundred messages) and does not keep to all of SQS's rules: duplicates can happen under
concurrency, a message older than 12 hours cannot be hidden again, and a FIFO queue's long poll
does not wake up. Nothing here reads credentials, profiles or broker URLs from the environment.
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
    """A queue on the local SQS, with its dead-letter queue, or ``None`` without one."""

    name: str
    url: str
    arn: str
    dlq: LocalQueue | None = None


#: The type of the fixture ``sqs_queue_factory``: takes the arguments of ``create_local_queue``.
LocalQueueFactory = Callable[..., LocalQueue]


def local_sqs_client(endpoint_url: str, **config: Any) -> SQSClient:
    """Return a boto3 client with dummy credentials. ``config`` fills ``botocore``'s ``Config``."""
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
    """Create a queue and, unless told otherwise, the dead-letter queue behind it.

    Args:
        client: the client of the server that gets the queue.
        name: default is a new, unique name. A FIFO queue's name gets the suffix
            ``.fifo`` that SQS asks for; the dead-letter queue's name is this one and ``-dlq``.
        fifo: make both queues FIFO queues, with deduplication by content.
        visibility_timeout_seconds: 0 to 43,200. Default 30, as in SQS.
        dead_letter_queue: ``False`` = no dead-letter queue and no redrive policy.
        max_receive_count: 1 to 1,000 receives, after which SQS itself moves a message to the
            dead-letter queue. Default 10, as in SQS.
        attributes: further SQS queue attributes, such as ``{"DelaySeconds": "5"}``.
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
    url = client.create_queue(QueueName=name, Attributes=dict(attributes))["QueueUrl"]  # type: ignore[arg-type]  # names are the caller's
    answer = client.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])
    return LocalQueue(name=name, url=url, arn=answer["Attributes"]["QueueArn"], dlq=dlq)


def local_sqs_settings(endpoint_url: str, *queues: LocalQueue) -> dict[str, Any]:
    """Return Celery settings for an app on only these queues. The first is the default queue.

    The queues are ``predefined_queues``: a task sent to any other queue fails with kombu's
    ``UndefinedQueueException`` instead of creating that queue.
    """
    broker_url = f"sqs://{ACCESS_KEY}:{SECRET_KEY}@{urlsplit(endpoint_url).netloc}//"
    return {
        "broker_url": broker_url,
        "broker_read_url": broker_url,
        "broker_write_url": broker_url,
        "broker_transport_options": {
            "region": REGION,
            "is_secure": urlsplit(endpoint_url).scheme == "https",
            # Without long polls, because a poll goes on in the server after its worker has stopped.
            # It would receive the next message without a worker, and that message would stay
            # hidden for the whole visibility timeout.
            "wait_time_seconds": 0,
            "polling_interval": 0.05,
            "predefined_queues": {queue.name: {"url": queue.url} for queue in queues},
        },
        "task_default_queue": queues[0].name,
        "task_always_eager": False,
        "result_backend": "cache+memory://",
        # A worker in this process must leave logging and output to pytest.
        "worker_hijack_root_logger": False,
        "worker_redirect_stdouts": False,
    }


@contextmanager
def on_local_sqs(app: Celery, endpoint_url: str, *queues: LocalQueue) -> Iterator[Celery]:
    """Move a Celery app to these queues, and make it the current app, until the block ends.

    Celery lets ``CELERY_BROKER_URL`` and the like win over an app's settings. The block removes
    these variables from the environment, because a test must not reach a real broker.

    The app gets a fresh store in memory, so tests do not share guards, steps and locks. A test that
    needs another store sets ``app.conf.sqs_backoff`` inside the block.
    """
    with pytest.MonkeyPatch.context() as patch, setup_default_app(app):
        for kind in ("BROKER", "BROKER_READ", "BROKER_WRITE"):
            patch.delenv(f"CELERY_{kind}_URL", raising=False)
        patch.delenv("CELERY_RESULT_BACKEND", raising=False)
        patch.delenv("TEST_BROKER", raising=False)  # read by celery.contrib.testing
        settings = local_sqs_settings(endpoint_url, *queues)
        app.conf.get("broker_url")  # Celery replaces ``app.conf`` when it is first read
        # Records of another test, or of a real store, must not decide about this test's tasks.
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
        app: an app that is :func:`on_local_sqs`. Define all its tasks first, because the worker
            does not learn of later ones.
        pool: ``"solo"`` or ``"threads"``. Others need a process of their own.
        options: as for ``celery.contrib.testing.worker.start_worker``, such as ``concurrency=2``
            and ``shutdown_timeout=30``, and for ``celery.worker.WorkController``.

    Raises:
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
        # A receive that is still under way would take the next message. It ends soon, because it is
        # no long poll.
        for thread in set(threading.enumerate()) - others:
            if thread.name.startswith("sqs-poll-"):
                thread.join(timeout=5)
        # kombu before 5.7 keeps these for all channels, with the event loop of the ended worker.
        clients = Channel._predefined_queue_async_clients
        if isinstance(clients, dict):
            clients.clear()


def _leave_logging_alone(**_: object) -> None:
    """Keep Celery from setting up logging, which would outlive the worker.

    Celery leaves logging alone if a function is connected to ``setup_logging``.
    """


@pytest.fixture(scope="session")
def sqs_server() -> Iterator[str]:
    """Start an SQS in this process on a free port of 127.0.0.1, and return its endpoint URL.

    The whole session shares it. Each test has queues of its own.
    """
    try:  # here, as a test without SQS does not wait for it
        from moto.server import ThreadedMotoServer
    except ImportError as exc:
        raise ImportError(_INSTALL.format("moto")) from exc
    requests_log = logging.getLogger("werkzeug")
    level = requests_log.level
    requests_log.setLevel(logging.WARNING)  # a line for each request would bury a test's own log
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
    """Make queues as :func:`create_local_queue` does. The fixture deletes them after the test."""
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
    """Create a standard queue with a dead-letter queue, for this test alone."""
    return sqs_queue_factory()


@pytest.fixture
def sqs_celery_app(sqs_server: str, sqs_queue: LocalQueue) -> Iterator[Celery]:
    """Create a Celery app on ``sqs_queue``, the current app for this test."""
    with on_local_sqs(Celery("sqs_tests", set_as_current=False), sqs_server, sqs_queue) as app:
        yield app


@pytest.fixture
def sqs_worker(sqs_celery_app: Celery) -> Callable[..., AbstractContextManager[WorkController]]:
    """Run a worker on ``sqs_celery_app`` by ``with sqs_worker():``, as :func:`running_worker`."""
    return partial(running_worker, sqs_celery_app)


@pytest.fixture
def provider_proxy() -> Iterator[Callable[[str], ProviderProxy]]:
    """Start a proxy that harms chosen requests by ``proxy = provider_proxy(upstream)``."""
    with ExitStack() as stack:
        yield lambda upstream: stack.enter_context(running_provider_proxy(upstream))
