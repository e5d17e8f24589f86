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
    """Make a queue that is set up well but for what is changed."""
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


def test_a_good_queue_is_one_line(diagnose, broken):
    queue = broken()
    result = diagnose(queues=(queue,))
    assert result.exit_code == DONE, result.output
    assert result.stdout == f"{len(RULES)} rules, 1 queue ({queue.name}): all well\n"


def test_the_queues_that_workers_name_on_their_command_line_are_looked_at(diagnose, broken, app):
    """Without task_queues an app knows its default queue alone, which nobody may consume."""
    unused, bulk, mails = broken(), broken(DelaySeconds="60"), broken()
    names = f"{bulk.name},{mails.name}"
    result = diagnose("-Q", names, "--format", "json", queues=(unused, bulk, mails))
    assert [(f["id"], f["subject"]) for f in json.loads(result.stdout)["findings"]] == [
        ("W015", bulk.name)
    ]
    assert f"2 queues ({bulk.name}, {mails.name}): 1 warning" in diagnose("-Q", names).stdout


def test_a_queue_that_the_app_does_not_have_is_refused(diagnose, broken, app):
    app.conf.task_create_missing_queues = False
    result = diagnose("-Q", "absent", queues=(broken(),))
    assert result.exit_code == 2
    assert "'absent' is not in task_queues" in result.stderr


def test_queues_that_do_not_exist_are_findings_beside_those_of_others(diagnose, broken, app):
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


def test_tasks_that_only_a_worker_imports_are_looked_at(diagnose, app, tmp_path, monkeypatch):
    """``include``, ``imports`` and ``autodiscover_tasks`` name modules that nobody has imported."""
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


def test_a_module_that_cannot_be_imported_shows_no_credentials(
    diagnose, app, tmp_path, monkeypatch
):
    module = f"tasks_{uuid4().hex}"
    (tmp_path / f"{module}.py").write_text(f"raise ValueError('redis://u:{SECRET}@db: not a DSN')")
    monkeypatch.syspath_prepend(tmp_path)
    app.conf.include = [module]
    result = diagnose("--offline")
    assert result.exit_code == USAGE
    assert "ValueError: redis://***@db: not a DSN" in result.stderr
    assert SECRET not in result.output


def test_findings_can_be_ignored_with_a_reason_only(diagnose, broken, app):
    queue = broken(DelaySeconds="60")
    for rule in ("W015", f"W015:{queue.name}"):
        app.conf.sqs_backoff = {"ignore_findings": {rule: "we batch"}}
        result = diagnose("--format", "json", queues=(queue,))
        assert (result.exit_code, ids(result)) == (DONE, [])
        app.conf.sqs_backoff = {"ignore_findings": {rule: ""}}
        assert ids(diagnose("--format", "json")) == ["W015"]


def test_json_has_the_names_that_scripts_rely_on(diagnose, broken):
    """``fix`` has a third, for what neither can change."""
    queue = broken(DelaySeconds="60")
    [finding] = json.loads(diagnose("--format", "json", queues=(queue,)).stdout)["findings"]
    assert set(finding) == {"id", "severity", "subject", "evidence", "consequence", "fix"}
    assert {"aws", "terraform"} <= set(finding["fix"])
    assert finding["severity"] == "warning"
    assert finding["subject"] == queue.name
    assert finding["fix"]["aws"].startswith("aws sqs set-queue-attributes --queue-url ")
    assert "delay_seconds = 0" in finding["fix"]["terraform"]


def test_a_rule_can_be_explained(diagnose):
    result = diagnose("--explain", "w010")
    assert result.exit_code == 0
    assert "W010 (warning)" in result.stdout
    assert diagnose("--explain", "W999").exit_code == 2


def test_a_queue_that_cannot_be_read_is_no_good_queue(diagnose, app):
    """With predefined queues nothing is asked before the first attributes are read."""
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
    assert "all well" not in result.stdout


def test_an_identity_that_may_do_nothing_is_told_of_all_that_it_lacks(diagnose, app, queue, proxy):
    """Not of one action, and when it has that of the next."""
    proxy.inject(http_error(403, "AccessDenied", sender_fault=True))
    app.conf.update(local_sqs_settings(proxy.endpoint, queue))
    result = diagnose("--format", "json")
    assert result.exit_code == FOUND
    [found] = json.loads(result.stdout)["findings"]
    assert found["id"] == "E027"
    for action in ("GetQueueAttributes", "ChangeMessageVisibility", "DeleteMessage"):
        assert f"sqs:{action}" in found["evidence"]


def test_a_wrong_secret_key_lacks_no_permission(diagnose, app, queue, proxy):
    """Whoever is told so looks for a policy, and the key stays wrong."""
    proxy.inject(http_error(403, "SignatureDoesNotMatch", sender_fault=True))
    app.conf.update(local_sqs_settings(proxy.endpoint, queue))
    result = diagnose()
    assert result.exit_code == UNREACHABLE
    assert f"cannot read queue {queue.name}: SignatureDoesNotMatch" in result.stderr
    assert "E027" not in result.stdout


def test_a_denied_queue_is_not_well_where_the_denial_is_ignored(diagnose, app, queue, proxy):
    """None of its rules could be asked."""
    denied = http_error(403, "AccessDenied", sender_fault=True, actions=("GetQueueAttributes",))
    proxy.inject(denied)
    app.conf.update(local_sqs_settings(proxy.endpoint, queue))
    assert diagnose().exit_code == FOUND
    app.conf.sqs_backoff = {"ignore_findings": {"E027": "workers may not read attributes"}}
    result = diagnose()
    assert result.exit_code == UNREACHABLE
    assert f"cannot read queue {queue.name}: AccessDenied" in result.stderr
    assert "all well" not in result.stdout


def test_where_queues_may_not_be_listed_the_action_is_named(diagnose, app, queue, proxy):
    """Without predefined queues kombu lists them before all else."""
    proxy.inject(http_error(403, "AccessDenied", sender_fault=True, actions=("ListQueues",)))
    app.conf.update(local_sqs_settings(proxy.endpoint, queue))
    del app.conf.broker_transport_options["predefined_queues"]
    result = diagnose()
    assert result.exit_code == UNREACHABLE
    assert "cannot read the queues: AccessDenied (ListQueues)" in result.stderr


def test_a_list_of_brokers_is_looked_at(diagnose, broken, app):
    """Celery takes one, for failover; nothing was looked at, and all was well."""
    queue = broken(DelaySeconds="60")
    diagnose(queues=(queue,))
    app.conf.broker_url = [app.conf.broker_url]
    app.conf.broker_read_url = None
    assert ids(diagnose("--format", "json")) == ["W015"]


def test_offline_asks_nobody(diagnose, app):
    app.conf.update(broker_url="sqs://key:hunter2@127.0.0.1:1//", worker_send_task_events=True)
    result = diagnose("--offline", "--format", "json")
    assert ids(result) == ["W029"]
    assert SECRET not in result.output
