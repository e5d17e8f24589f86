"""The pytest fixtures of ``celery_sqs_backoff.testing`` do what their docstrings say."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from celery import Celery, current_app, shared_task
from celery.contrib.testing.app import setup_default_app
from kombu.transport.SQS import UndefinedQueueException

from celery_sqs_backoff import Guard, SQSBackoffTask, testing
from celery_sqs_backoff.store.memory import MemoryStore
from celery_sqs_backoff.testing import LocalQueue, on_local_sqs, running_worker

if TYPE_CHECKING:
    from mypy_boto3_sqs.client import SQSClient

StartWorker = Callable[..., AbstractContextManager[Any]]


def attributes(sqs: SQSClient, url: str) -> dict[str, str]:
    answer = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])
    return dict(answer["Attributes"])


def waiting(sqs: SQSClient, queue: LocalQueue) -> tuple[int, int]:
    """Return how many messages are visible, and how many are hidden."""
    found = attributes(sqs, queue.url)
    return (
        int(found["ApproximateNumberOfMessages"]),
        int(found["ApproximateNumberOfMessagesNotVisible"]),
    )


def test_queue(sqs_client, sqs_queue):
    """``sqs_queue`` has a dead-letter queue, SQS's visibility timeout, and 10 receives."""
    assert sqs_queue.dlq is not None
    found = attributes(sqs_client, sqs_queue.url)
    assert found["QueueArn"] == sqs_queue.arn
    assert found["VisibilityTimeout"] == "30"
    assert sqs_queue.dlq.arn in found["RedrivePolicy"]
    assert re.search(r'"maxReceiveCount": "?10\b', found["RedrivePolicy"])


def test_queue_factory(sqs_client, sqs_queue_factory):
    """``sqs_queue_factory`` makes a queue with the attributes that the test asks for."""
    queue = sqs_queue_factory(
        name="mail",
        fifo=True,
        visibility_timeout_seconds=7,
        max_receive_count=3,
        attributes={"DelaySeconds": "2"},
    )
    found = attributes(sqs_client, queue.url)
    assert queue.name == "mail.fifo"
    assert queue.dlq is not None
    assert queue.dlq.name == "mail-dlq.fifo"
    assert found["FifoQueue"] == "true"
    assert found["VisibilityTimeout"] == "7"
    assert found["DelaySeconds"] == "2"
    assert re.search(r'"maxReceiveCount": "?3\b', found["RedrivePolicy"])


@pytest.mark.parametrize("pool", ["solo", "threads"])
def test_worker(sqs_client, sqs_queue, sqs_celery_app, sqs_worker, pool):
    """``sqs_worker`` runs the tasks of the app, and leaves no message on the queue."""

    @sqs_celery_app.task(acks_late=True)
    def add(x, y):
        return x + y

    with sqs_worker(pool=pool):
        results = [add.delay(n, 1) for n in range(5)]
        assert [r.get(timeout=20, interval=0.02) for r in results] == [1, 2, 3, 4, 5]
    assert waiting(sqs_client, sqs_queue) == (0, 0)


def test_stopped_worker(sqs_client, sqs_queue, sqs_celery_app, sqs_worker):
    """A worker that has stopped receives no more messages.

    Otherwise its last long poll would receive the next message, and hide it from the test.
    """

    @sqs_celery_app.task
    def noop(): ...

    for _ in range(3):
        with sqs_worker():
            noop.delay().get(timeout=20, interval=0.02)
        sqs_client.send_message(QueueUrl=sqs_queue.url, MessageBody="for nobody")
        answer = sqs_client.receive_message(QueueUrl=sqs_queue.url, WaitTimeSeconds=2)
        [message] = answer["Messages"]
        sqs_client.delete_message(QueueUrl=sqs_queue.url, ReceiptHandle=message["ReceiptHandle"])


def test_shared_task(sqs_celery_app, sqs_worker):
    """A task made with ``@shared_task`` is sent to the local SQS."""

    @shared_task(name="tests.shared_double")
    def double(x):
        return x * 2

    with sqs_worker():
        assert double.delay(21).get(timeout=20, interval=0.02) == 42


def test_other_queue(sqs_client, sqs_celery_app):
    """Sending a task to a queue that does not exist raises an error, and creates no queue."""

    @sqs_celery_app.task
    def noop(): ...

    with pytest.raises(UndefinedQueueException):
        noop.apply_async(queue="somewhere-else")
    urls = sqs_client.list_queues().get("QueueUrls", [])
    assert not [url for url in urls if url.endswith("somewhere-else")]


def test_users_app(monkeypatch, sqs_server, sqs_queue_factory):
    """``on_local_sqs`` lets a user's own app use the local SQS, and then restores its settings.

    The test does so twice. The second time must not use connections, queues or results of the
    first.
    """
    monkeypatch.setenv("CELERY_BROKER_URL", "redis://production:6379/0")
    monkeypatch.setenv("CELERY_RESULT_BACKEND", "redis://production:6379/1")
    app = Celery("users_own", broker="redis://laptop", set_as_current=False)
    app.conf.task_default_queue = "users-own"
    app.conf.task_always_eager = True
    before = current_app._get_current_object()

    @app.task
    def where_am_i():
        return str(where_am_i.request.delivery_info["routing_key"])

    for _ in range(2):
        queue = sqs_queue_factory()
        with on_local_sqs(app, sqs_server, queue):
            assert app.conf.broker_url.startswith("sqs://testing:")
            with running_worker(app):
                assert where_am_i.delay().get(timeout=20, interval=0.02) == queue.name

    assert app.conf.broker_url == os.environ["CELERY_BROKER_URL"]
    assert app.conf.task_default_queue == "users-own"
    assert app.conf.task_always_eager
    assert app.amqp.queues.keys() == {"users-own"}
    assert current_app._get_current_object() is before


def test_moved_app_is_current(sqs_server, sqs_queue):
    """In ``on_local_sqs``, the app is the current app. Afterwards the former one is current again.

    ``@shared_task`` uses the current app. In a project, that is the last app that was imported.
    """
    with setup_default_app(current_app._get_current_object()):
        projects_own = Celery("projects_own")
        with on_local_sqs(Celery("tests", set_as_current=False), sqs_server, sqs_queue) as app:
            assert current_app._get_current_object() is app
        assert current_app._get_current_object() is projects_own


def test_credentials(monkeypatch, sqs_server, sqs_celery_app):
    """The fixtures use dummy credentials, and not the real ones from the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAREAL")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "real")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "real")

    client = testing.local_sqs_client(sqs_server)
    with sqs_celery_app.connection_for_write() as connection:
        channel = connection.default_channel
        for sqs in (
            client,
            channel.sqs(),
            channel.sqs(queue=sqs_celery_app.conf.task_default_queue),
        ):
            found = sqs._request_signer._credentials.get_frozen_credentials()
            assert (found.access_key, found.secret_key, found.token) == ("testing", "testing", None)


def test_prefork(sqs_worker):
    """``sqs_worker`` refuses a pool whose tasks would not run in the test's process."""
    with pytest.raises(ValueError, match="invalid pool 'prefork'"), sqs_worker(pool="prefork"):
        pass


def test_logging(sqs_celery_app, sqs_worker, caplog):
    """The worker of ``sqs_worker`` leaves logging to pytest, and logs no requests to SQS."""

    @sqs_celery_app.task
    def fail():
        raise RuntimeError("said in the log")

    with sqs_worker():
        fail.delay().get(timeout=20, interval=0.02, propagate=False)
    assert "said in the log" in caplog.text
    assert "POST / HTTP" not in caplog.text


def test_example(pytester):
    """The example in the docstring of ``celery_sqs_backoff.testing`` works."""
    example = re.search(r"is retried::\n\n(.*?)\n\n``@shared", testing.__doc__ or "", re.DOTALL)
    assert example is not None
    pytester.makeconftest('pytest_plugins = ["celery_sqs_backoff.testing"]')
    pytester.makepyfile(textwrap.dedent(example[1]))
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)


def test_import_of_moto(pytester):
    """The pytest plugin imports moto only when a fixture needs it.

    Unit tests that need no SQS must not wait for this import.
    """
    pytester.makeconftest('pytest_plugins = ["celery_sqs_backoff.testing"]')
    pytester.makepyfile("import sys\ndef test_it(): assert 'moto' not in sys.modules")
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


@pytest.mark.parametrize("test", [1, 2])
def test_store_per_test(sqs_celery_app, sqs_worker, test):
    """Each test has its own store.

    Otherwise a guard that has let a message pass in one test would refuse the message of the next.
    """

    @sqs_celery_app.task(
        base=SQSBackoffTask, shared=False, name="guarded", guard=Guard(key="mail:7", window=3600)
    )
    def mail():
        return f"sent by test {test}"

    with sqs_worker():
        assert mail.delay().get(timeout=10) == f"sent by test {test}"


def test_real_store(sqs_server, sqs_queue):
    """In ``on_local_sqs``, an app with a real store uses a store in memory instead."""
    app = Celery("mine", set_as_current=False)
    app.conf.sqs_backoff = {"store": "redis://production:6379/0", "crash_budget": 2}
    with on_local_sqs(app, sqs_server, sqs_queue):
        assert isinstance(app.conf.sqs_backoff["store"], MemoryStore)
        assert app.conf.sqs_backoff["crash_budget"] == 2
    assert app.conf.sqs_backoff["store"] == "redis://production:6379/0"


def test_django_settings(sqs_server, sqs_queue):
    """In ``on_local_sqs``, an app keeps its settings from Django, except for the store.

    In Django the name of our settings is ``CELERY_SQS_BACKOFF``.
    """
    settings = SimpleNamespace(CELERY_SQS_BACKOFF={"store": "django", "max_retries": 3})
    app = Celery("django-project", set_as_current=False)
    app.config_from_object(settings, namespace="CELERY")
    with on_local_sqs(app, sqs_server, sqs_queue):

        @app.task(base=SQSBackoffTask, shared=False, name="mail", lazy=False)
        def mail(): ...

        assert isinstance(app.conf.sqs_backoff["store"], MemoryStore)
        assert mail.max_retries == 3
    assert app.conf.sqs_backoff["store"] == "django"
