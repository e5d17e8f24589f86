"""``celery sqs-doctor`` and the Django checks, on a real SQS server."""

from __future__ import annotations

import json
from contextlib import ExitStack
from uuid import uuid4

import pytest
from celery.bin.celery import celery
from click.testing import CliRunner, Result
from kombu import Queue

from celery_sqs_backoff.commands.exit_codes import (
    DONE,
    FOUND,
    UNREACHABLE,
    USAGE,
)
from celery_sqs_backoff.doctor import RULES
from celery_sqs_backoff.testing import local_sqs_settings
from tests.support.doctored import doctored_app
from tests.support.fault_proxy import http_error
from tests.support.queue_names import queue_name

SECRET = "hunter2"


@pytest.fixture
def app():
    with doctored_app() as made:
        yield made


@pytest.fixture
def diagnose(app, sqs_endpoint, monkeypatch):
    def run(*arguments, queues=()):
        if queues:
            app.conf.update(local_sqs_settings(sqs_endpoint, *queues))
        monkeypatch.setattr("celery.bin.celery.find_app", lambda name: app)
        return CliRunner().invoke(celery, ["-A", "shop", "sqs-doctor", *arguments])

    return run


@pytest.fixture
def broken(sqs):
    """Yield a function that makes a queue that is set up well, except for some attributes."""
    from celery_sqs_backoff.testing import create_local_queue

    with ExitStack() as stack:

        def make(*, dlq=None, **changed):
            made = create_local_queue(
                sqs,
                name=queue_name("doctor"),
                visibility_timeout_seconds=int(changed.pop("VisibilityTimeout", "30")),
                max_receive_count=1000,
                attributes=changed,
            )
            stack.callback(sqs.delete_queue, QueueUrl=made.url)
            assert made.dlq is not None
            stack.callback(sqs.delete_queue, QueueUrl=made.dlq.url)
            attributes = {"MessageRetentionPeriod": "1209600"} | (dlq or {})
            sqs.set_queue_attributes(QueueUrl=made.dlq.url, Attributes=attributes)
            return made

        yield make


def ids(result: Result) -> list[str]:
    return [finding["id"] for finding in json.loads(result.stdout)["findings"]]


def test_healthy_queue(diagnose, broken):
    """For a queue that is set up well, the doctor prints one line."""
    queue = broken()
    result = diagnose(queues=(queue,))
    assert result.exit_code == DONE, result.output
    assert result.stdout == f"{len(RULES)} rules, 1 queue ({queue.name}): no findings\n"


def test_queues_by_option(diagnose, broken, app):
    """With ``-Q``, the doctor checks the queues that workers name on their command line.

    Without ``task_queues``, an app knows only its default queue. It may have no consumer.
    """
    unused, bulk, mails = broken(), broken(DelaySeconds="60"), broken()
    names = f"{bulk.name},{mails.name}"
    result = diagnose("-Q", names, "--format", "json", queues=(unused, bulk, mails))
    assert [(f["id"], f["subject"]) for f in json.loads(result.stdout)["findings"]] == [
        ("W015", bulk.name)
    ]
    assert f"2 queues ({bulk.name}, {mails.name}): 1 warning" in diagnose("-Q", names).stdout


def test_unknown_queue(diagnose, broken, app):
    """The doctor refuses a queue that the app does not have."""
    app.conf.task_create_missing_queues = False
    result = diagnose("-Q", "absent", queues=(broken(),))
    assert result.exit_code == 2
    assert "'absent' is not in task_queues" in result.stderr


def test_missing_queues(diagnose, broken, app):
    """The doctor reports a queue that does not exist, and still checks the other queues."""
    slow = broken(DelaySeconds="60")
    app.conf.task_queues = [Queue(slow.name), Queue("absent")]
    result = diagnose("--format", "json", queues=(slow,))
    assert ids(result) == ["E001", "W015"]
    assert "predefined_queues does not name it" in result.stdout
    options = {k: v for k, v in app.conf.broker_transport_options.items() if "prede" not in k}
    app.conf.broker_transport_options = options
    result = diagnose("--format", "json")
    assert ids(result) == ["E001", "W015"]
    assert result.exit_code == FOUND
    assert "aws sqs create-queue --region us-east-1 --queue-name absent" in result.stdout


def test_tasks_of_workers(diagnose, app, tmp_path, monkeypatch):
    """The doctor checks tasks that only a worker imports.

    ``include``, ``imports`` and ``autodiscover_tasks`` name modules that are not imported yet.
    """
    module = f"tasks_{uuid4().hex}"
    (tmp_path / f"{module}.py").write_text(
        "from celery import shared_task\n@shared_task(name='shop.uncovered')\ndef task(): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    app.conf.include = [module]
    result = diagnose("--offline")
    assert "W019 shop.uncovered" in result.stdout
    assert result.exit_code == DONE
    assert diagnose("--offline", "--strict").exit_code == FOUND


def test_module_with_credentials(diagnose, app, tmp_path, monkeypatch):
    """The error of a module that cannot be imported shows no credentials."""
    module = f"tasks_{uuid4().hex}"
    (tmp_path / f"{module}.py").write_text(f"raise ValueError('redis://u:{SECRET}@db: not a DSN')")
    monkeypatch.syspath_prepend(tmp_path)
    app.conf.include = [module]
    result = diagnose("--offline")
    assert result.exit_code == USAGE
    assert "ValueError: redis://***@db: not a DSN" in result.stderr
    assert SECRET not in result.output


def test_ignored_findings(diagnose, broken, app):
    """A user can ignore a finding only with a reason."""
    queue = broken(DelaySeconds="60")
    for rule in ("W015", f"W015:{queue.name}"):
        app.conf.sqs_backoff = {"ignore_findings": {rule: "we batch"}}
        result = diagnose("--format", "json", queues=(queue,))
        assert (result.exit_code, ids(result)) == (DONE, [])
        app.conf.sqs_backoff = {"ignore_findings": {rule: ""}}
        assert ids(diagnose("--format", "json")) == ["W015"]


def test_json_keys(diagnose, broken):
    """The JSON output has the keys that scripts rely on.

    ``fix`` has a third key, for changes by other means than the AWS CLI and Terraform.
    """
    queue = broken(DelaySeconds="60")
    [finding] = json.loads(diagnose("--format", "json", queues=(queue,)).stdout)["findings"]
    assert set(finding) == {"id", "severity", "subject", "evidence", "consequence", "fix"}
    assert {"aws", "terraform"} <= set(finding["fix"])
    assert finding["severity"] == "warning"
    assert finding["subject"] == queue.name
    assert finding["fix"]["aws"].startswith("aws sqs set-queue-attributes --queue-url ")
    assert "delay_seconds = 0" in finding["fix"]["terraform"]


def test_explain(diagnose):
    """``--explain`` prints a rule, in upper or lower case."""
    result = diagnose("--explain", "w010")
    assert result.exit_code == 0
    assert "W010 (warning)" in result.stdout
    assert diagnose("--explain", "W999").exit_code == 2


def test_unreadable_queue(diagnose, app):
    """The doctor ends with an error if it cannot read a queue, and does not say only "no findings".

    With predefined queues, its first call to SQS is the one that reads the attributes.
    """
    url = "http://127.0.0.1:1/123456789012/mails"
    app.conf.update(
        broker_url="sqs://key:hunter2@127.0.0.1:1//",
        task_default_queue="mails",
        broker_transport_options={
            "region": "us-east-1",
            "is_secure": False,
            "client-config": {"retries": {"total_max_attempts": 1}, "connect_timeout": 1},
            "predefined_queues": {"mails": {"url": url}},
        },
    )
    result = diagnose()
    assert result.exit_code == UNREACHABLE
    assert "cannot read queue mails: EndpointConnectionError" in result.stderr
    assert not result.stdout.endswith("no findings\n")


def test_no_permissions(diagnose, app, queue, proxy):
    """The doctor names all missing permissions in one finding.

    So a user need not grant one after the other.
    """
    proxy.inject(http_error(403, "AccessDenied", sender_fault=True))
    app.conf.update(local_sqs_settings(proxy.endpoint, queue))
    result = diagnose("--format", "json")
    assert result.exit_code == FOUND
    [found] = json.loads(result.stdout)["findings"]
    assert found["id"] == "E027"
    for action in ("GetQueueAttributes", "ChangeMessageVisibility", "DeleteMessage"):
        assert f"sqs:{action}" in found["evidence"]


def test_wrong_secret_key(diagnose, app, queue, proxy):
    """The doctor says that the secret key is wrong, and not that a permission is missing.

    Otherwise the user would change a policy, and the key would stay wrong.
    """
    proxy.inject(http_error(403, "SignatureDoesNotMatch", sender_fault=True))
    app.conf.update(local_sqs_settings(proxy.endpoint, queue))
    result = diagnose()
    assert result.exit_code == UNREACHABLE
    assert f"cannot read queue {queue.name}: SignatureDoesNotMatch" in result.stderr
    assert "E027" not in result.stdout


def test_ignored_denial(diagnose, app, queue, proxy):
    """If a user ignores a missing permission, the doctor still does not say only "no findings".

    Without the permission it could not check the queue.
    """
    denied = http_error(403, "AccessDenied", sender_fault=True, actions=("GetQueueAttributes",))
    proxy.inject(denied)
    app.conf.update(local_sqs_settings(proxy.endpoint, queue))
    assert diagnose().exit_code == FOUND
    app.conf.sqs_backoff = {"ignore_findings": {"E027": "workers may not read attributes"}}
    result = diagnose()
    assert result.exit_code == UNREACHABLE
    assert f"cannot read queue {queue.name}: AccessDenied" in result.stderr
    assert not result.stdout.endswith("no findings\n")


def test_no_right_to_list(diagnose, app, queue, proxy):
    """The doctor names the missing action if it may not list queues.

    Without predefined queues, kombu first lists all queues.
    """
    proxy.inject(http_error(403, "AccessDenied", sender_fault=True, actions=("ListQueues",)))
    app.conf.update(local_sqs_settings(proxy.endpoint, queue))
    del app.conf.broker_transport_options["predefined_queues"]
    result = diagnose()
    assert result.exit_code == UNREACHABLE
    assert "cannot read the queues: AccessDenied (ListQueues)" in result.stderr


def test_list_of_brokers(diagnose, broken, app):
    """The doctor also checks an app with a list of brokers, which Celery takes for failover."""
    queue = broken(DelaySeconds="60")
    diagnose(queues=(queue,))
    app.conf.broker_url = [app.conf.broker_url]
    app.conf.broker_read_url = None
    assert ids(diagnose("--format", "json")) == ["W015"]


def test_offline(diagnose, app):
    """``--offline`` calls neither SQS nor any other server."""
    app.conf.update(broker_url="sqs://key:hunter2@127.0.0.1:1//", worker_send_task_events=True)
    result = diagnose("--offline", "--format", "json")
    assert ids(result) == ["W029"]
    assert SECRET not in result.output
