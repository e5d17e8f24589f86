"""The check at a worker's start. It applies the cheap rules of ``sqs-doctor``, and only logs."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, Task
from kombu import Queue as KombuQueue

from celery_sqs_backoff import SQSBackoffTask
from celery_sqs_backoff.sqs.queues import Queue, read_queue
from celery_sqs_backoff.worker import check_up as module
from celery_sqs_backoff.worker.check_up import check_up, start_check_up
from tests.support.processes import eventually


def nothing() -> None:
    """Serve as a task's body that never runs."""


URL = "https://sqs.eu-central-1.amazonaws.com/1/mails"


@pytest.fixture
def app() -> Iterator[Celery]:
    made = Celery("checked", set_as_current=False)
    made.conf.worker_send_task_events = False
    made.task(base=SQSBackoffTask, name="shop.mail", shared=False)(nothing)
    made.finalize()
    for name in set(made.tasks) - {"shop.mail"}:
        del made.tasks[name]
    yield made
    made.close()


def redrive(arn: str, count: int = 1000) -> str:
    return json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": count})


def queue(url: str = URL, **attributes: str) -> Queue:
    class Client:
        def get_queue_attributes(self, **_: Any) -> Any:
            found = {
                "QueueArn": "arn:aws:sqs:eu-central-1:1:mails",
                "VisibilityTimeout": "30",
                "RedrivePolicy": redrive("arn:aws:sqs:eu-central-1:1:mails-dlq"),
            }
            return {"Attributes": {**found, **attributes}}

    return read_queue(Client(), url, now=0)  # type: ignore[arg-type]


SMALL = queue(RedrivePolicy=redrive("arn:aws:sqs:eu-central-1:1:mails-dlq", 5))


@pytest.mark.parametrize(
    ("checked", "rules"),
    [
        pytest.param(queue(), [], id="good"),
        pytest.param(queue(VisibilityTimeout="0"), ["E011"], id="no timeout"),
        pytest.param(SMALL, ["W010"], id="few receives"),
        pytest.param(Queue(URL, is_read=False), [], id="not read"),
    ],
)
def test_queue(app: Celery, checked: Queue, rules: list[str]) -> None:
    """The check logs a line for each fault of a queue, but skips a queue that it cannot read."""
    found = [line.split()[:2] for _, line in check_up(app, [("mails", checked)])]
    assert found == [[rule, "mails:"] for rule in rules]


@pytest.mark.parametrize(("routed_to", "rules"), [("bulk", []), ("mails", ["W010"])])
def test_routes(app: Celery, routed_to: str, rules: list[str]) -> None:
    """A queue's ``maxReceiveCount`` only has to suffice for tasks that the app sends to it."""
    app.task(base=SQSBackoffTask, name="shop.ping", max_retries=2, shared=False)(nothing)
    app.conf.task_routes = {"shop.ping": "mails", "shop.mail": routed_to}
    assert [line.split()[0] for _, line in check_up(app, [("mails", SMALL)])] == rules


@pytest.mark.parametrize("name", ["mails", "an alias of it"])
def test_beat(app: Celery, name: str) -> None:
    """If beat sends a task to a queue, the queue's ``maxReceiveCount`` must suffice for it too."""
    app.task(base=SQSBackoffTask, name="shop.ping", max_retries=2, shared=False)(nothing)
    app.conf.task_routes = {"shop.ping": "mails"}
    app.conf.task_queues = [KombuQueue("mails", alias="an alias of it")]
    entry = {"task": "shop.mail", "schedule": 60, "options": {"queue": name}}
    app.conf.beat_schedule = {"nightly": entry}
    assert [line.split()[0] for _, line in check_up(app, [("mails", SMALL)])] == ["W010"]


def test_line_per_rule(app: Celery) -> None:
    """The check logs one line for each rule, even if many tasks or queues break it."""
    for number in range(50):
        app.task(base=Task, name=f"shop.other{number:02}", shared=False)(nothing)
    [(severity, line), *more] = check_up(app, [("mails", queue(DelaySeconds="60"))])
    assert severity.value == "warning"
    assert line.startswith("W015 mails: DelaySeconds is 60; expected 0. Each task without")
    assert [text.partition(":")[0] for _, text in more] == ["W019 shop.other00 (and 49 more)"]


@pytest.mark.parametrize(
    ("ignored", "lines"),
    [({"W015": "we batch"}, 0), ({"W015:mails": "we batch"}, 0), ({"W015": ""}, 1), (None, 1)],
    ids=repr,
)
def test_ignored(app: Celery, ignored: Any, lines: int) -> None:
    """The check does not log a finding that the user ignores with a reason."""
    app.conf.sqs_backoff = {"ignore_findings": ignored}
    assert len(check_up(app, [("mails", queue(DelaySeconds="60"))])) == lines


def test_auto_concurrency(app: Celery) -> None:
    """The check also works if ``worker_concurrency`` is "auto"."""
    app.conf.worker_concurrency = "auto"  # Celery 5.7
    assert check_up(app, []) == []


def test_bug(
    app: Celery, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the check itself raises an error, the worker logs the type of the error, not its text."""

    def broken(*_: object) -> None:
        raise LookupError("SECRET")

    monkeypatch.setattr(module, "check_up", broken)
    start_check_up(app, [])
    eventually(lambda: "sqs_backoff.check_up_failed: builtins.LookupError" in caplog.text)
    assert "SECRET" not in caplog.text


def test_severity(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    """The severity of a finding is the level of its log line."""
    caplog.set_level(logging.INFO)
    start_check_up(app, [("mails", queue(DelaySeconds="60", VisibilityTimeout="0"))])
    eventually(lambda: len(caplog.records) == 2)
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert caplog.records[1].getMessage().startswith("sqs_backoff.finding: W015 mails")


def test_no_thread_left(
    app: Celery, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If no thread can be started, the worker starts without the check, and logs this once."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    start_check_up(app, [])
    assert caplog.text.count("sqs_backoff.no_thread_left") == 1
