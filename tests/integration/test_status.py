"""``celery sqs-status`` shows the numbers of messages of queues, and null for unknown numbers."""

import json
import socket
import time

import pytest
from botocore.config import Config
from celery import Celery
from celery.bin.celery import celery
from click.testing import CliRunner
from kombu import Queue
from kombu.transport.SQS import Channel

from celery_sqs_backoff.commands import status
from celery_sqs_backoff.commands.exit_codes import DONE, UNREACHABLE, USAGE
from celery_sqs_backoff.observe.board import QueueNow, WorkerNow
from celery_sqs_backoff.sqs import clients
from celery_sqs_backoff.sqs.find_queue import connection_to_look
from celery_sqs_backoff.testing import local_sqs_settings


@pytest.fixture
def app(sqs_endpoint, queue):
    made = Celery("watched", set_as_current=False)
    made.conf.update(local_sqs_settings(sqs_endpoint, queue))
    yield made
    made.close()


@pytest.fixture
def run(app, monkeypatch):
    def run(*arguments):
        monkeypatch.setattr("celery.bin.celery.find_app", lambda name: app)
        return CliRunner().invoke(celery, ["-A", "shop", "sqs-status", *arguments])

    return run


def test_empty_queue(run, queue):
    """For an empty queue, the status knows all numbers."""
    result = run("--json")
    assert result.exit_code == DONE
    assert json.loads(result.stdout) == {
        "queues": [
            {
                "name": queue.name,
                "ready": 0,
                "waiting": 0,
                "running": 0,
                "delayed": 0,
                "dead_letters": 0,
                "oldest_seconds": None,
                "in_flight_share": 0.0,
            }
        ],
        "providers": [],
    }


def test_in_flight(run, queue, sqs):
    """Without reports of workers, the status does not know which messages in flight are running."""
    assert queue.dlq is not None
    for url, bodies in ((queue.url, 3), (queue.dlq.url, 2)):
        for _ in range(bodies):
            sqs.send_message(QueueUrl=url, MessageBody="{}")
    sqs.receive_message(QueueUrl=queue.url, MaxNumberOfMessages=1)
    [found] = json.loads(run("--json").stdout)["queues"]
    assert (found["ready"], found["waiting"], found["running"]) == (2, None, None)
    assert found["dead_letters"] == 2
    assert found["in_flight_share"] == pytest.approx(1 / 120_000)
    shown = run().stdout
    assert "in flight" in shown
    assert queue.name[:20] in shown.replace("\n", "")


def test_memory_store(run, app):
    """The status says that workers cannot report through a store in memory."""
    app.conf.sqs_backoff = {"store": "memory://"}
    assert "sqs_backoff['store'] is one that workers do not share" in run().stdout
    assert run("--json").stderr == ""


def test_unreadable_queue(run, app):
    """The status names the queues that it cannot read, and each reason once."""
    url = "http://127.0.0.1:1/123456789012/mails"
    app.conf.broker_transport_options = {
        **app.conf.broker_transport_options,
        "predefined_queues": {name: {"url": url} for name in ("mails", "bulk")},
        "client-config": {"retries": {"total_max_attempts": 1}},
    }
    app.conf.update(broker_read_url="sqs://k:hunter2@127.0.0.1:1//", task_default_queue="mails")
    result = run("--json")
    assert result.exit_code == UNREACHABLE
    assert json.loads(result.stdout)["queues"][0]["ready"] is None
    assert "cannot read queue mails: EndpointConnectionError" in result.stderr
    assert "hunter2" not in result.output
    result = run("-Q", "mails,bulk")
    assert result.exit_code == UNREACHABLE
    assert result.stderr.count("EndpointConnectionError") == 1
    assert "cannot read queues mails, bulk: EndpointConnectionError" in result.stderr


def test_missing_queue(run, app, queue):
    """The status shows the other queues even if one queue does not exist."""
    app.conf.task_queues = [Queue(queue.name), Queue("absent")]
    result = run("--json")
    assert result.exit_code == USAGE
    [there, absent] = json.loads(result.stdout)["queues"]
    assert (there["ready"], absent["name"], absent["ready"]) == (0, "absent", None)
    assert "cannot read queue absent: NotInPredefinedQueues" in result.stderr
    options = {k: v for k, v in app.conf.broker_transport_options.items() if "prede" not in k}
    app.conf.broker_transport_options = options
    result = run("--json")
    assert result.exit_code == USAGE
    assert [found["ready"] for found in json.loads(result.stdout)["queues"]] == [0, None]
    assert "cannot read queue absent: QueueDoesNotExist" in result.stderr


def test_queues_of_workers(run, app, queue, monkeypatch):
    """The status names queues from which workers receive and which it does not show.

    Without ``task_queues``, an app knows only its default queue. It may have no consumer.
    """
    app.conf.task_default_queue = "unused"
    told = WorkerNow(queues={queue.name: QueueNow(running=1)})
    monkeypatch.setattr(status, "_workers", lambda app: ([told], ""))
    result = run("--json")
    assert [found["name"] for found in json.loads(result.stdout)["queues"]] == ["unused"]
    assert f"workers also receive from {queue.name}; name queues with -Q" in result.stderr
    assert "not shown: workers also receive from" in run().stdout
    result = run("--json", "-Q", queue.name)
    assert result.exit_code == DONE
    assert [found["name"] for found in json.loads(result.stdout)["queues"]] == [queue.name]
    assert "not shown" not in result.stderr + run("-Q", queue.name).stdout
    assert "not shown" not in run("-Q", "unused").stdout, "the user has named the queues"


def test_shared_client(run, app, queue, monkeypatch):
    """Queues with the same credentials share an SQS client.

    A client costs up to half a second of CPU time, which adds up for 200 queues.
    """
    made = []
    new_client = Channel.new_sqs_client

    def new(channel, region, access_key_id, *secrets):
        made.append(access_key_id)
        return new_client(channel, region, access_key_id, *secrets)

    monkeypatch.setattr(Channel, "new_sqs_client", new)
    other = {"access_key_id": "other", "secret_access_key": "testing"}
    queues = {name: {"url": queue.url} for name in ("a", "b", "c")}
    elsewhere = queue.url.replace("127.0.0.1", "localhost")
    queues |= {name: {"url": elsewhere, **other} for name in ("d", "e")}
    app.conf.task_queues = [Queue(name) for name in queues]
    app.conf.broker_transport_options = {
        **app.conf.broker_transport_options,
        "predefined_queues": queues,
    }
    result = run("--json")
    assert result.exit_code == DONE
    assert [found["ready"] for found in json.loads(result.stdout)["queues"]] == [0] * 5
    assert sorted(made) == ["other", "testing"]


def test_store_is_away(run, app):
    """The status says on stderr that it cannot read the store.

    Otherwise a script would not know why there is no provider.
    """
    assert run("--json").stderr == "", "without a store nothing is missing"
    app.conf.sqs_backoff = {"store": "redis://:hunter2@127.0.0.1:1/0", "secret": "s" * 32}
    result = run("--json")
    assert json.loads(result.stdout)["providers"] == []
    assert result.stderr == "Error: the store could not be read (ConnectionError)\n"
    assert result.exit_code == DONE


def test_silent_sqs(run, app, monkeypatch):
    """The status soon ends with an error if SQS does not answer.

    With botocore's own timeouts, this would take three minutes for each queue.
    """
    patience = clients._SETTLING.merge(Config(connect_timeout=0.3, read_timeout=0.3))
    monkeypatch.setattr(clients, "_SETTLING", patience)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        app.conf.broker_read_url = f"sqs://k:s@{url.removeprefix('http://')}//"
        app.conf.broker_transport_options = {
            "region": "us-east-1",
            "is_secure": False,
            "predefined_queues": {"mails": {"url": f"{url}/000000000000/mails"}},
        }
        began = time.monotonic()
        result = run("-Q", "mails")
    assert time.monotonic() - began < 10
    assert result.exit_code == UNREACHABLE
    assert "cannot read queue mails: ReadTimeoutError" in result.stderr


def test_own_timeouts(app):
    """The status uses the user's own timeouts if there are any."""
    app.conf.broker_transport_options = {"client-config": {"read_timeout": 77}}
    config = connection_to_look(app).transport_options["client-config"]
    assert (config["connect_timeout"], config["read_timeout"]) == (5, 77)
