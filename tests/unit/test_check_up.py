"""The cheap half of the doctor at a worker's start: a line per rule; it stops no worker."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, Task

from celery_sqs_backoff import SQSBackoffTask
from celery_sqs_backoff.sqs.queues import Queue, read_queue
from celery_sqs_backoff.worker import check_up as module
from celery_sqs_backoff.worker.check_up import check_up, start_check_up
from tests.support.processes import eventually


def nothing() -> None:
    """Never run."""


URL = "https://sqs.eu-central-1.amazonaws.com/1/mails"


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    monkeypatch.setattr("celery_sqs_backoff.doctor.look._CLIENT_RETRIES", ())
    made = Celery("checked", set_as_current=False)
    made.conf.worker_send_task_events = False
    made.task(base=SQSBackoffTask, name="shop.mail", shared=False)(nothing)
    made.finalize()
    for name in set(made.tasks) - {"shop.mail"}:
        del made.tasks[name]
    yield made
    made.close()


def queue(**attributes: str) -> Queue:
    class Client:
        def get_queue_attributes(self, **_: Any) -> Any:
            found = {"VisibilityTimeout": "30", "MaximumMessageSize": "1048576"}
            return {"Attributes": {**found, **attributes}}

    return read_queue(Client(), URL)  # type: ignore[arg-type]


def test_a_good_queue_is_not_spoken_of(app: Celery) -> None:
    assert check_up(app, [("mails", queue())]) == []


def test_what_the_start_says_itself_is_not_said_twice(app: Celery) -> None:
    assert check_up(app, [("mails", queue(VisibilityTimeout="0"))]) == []


def test_each_rule_has_one_line(app: Celery) -> None:
    for number in range(50):
        app.task(base=Task, name=f"shop.other{number:02}", shared=False)(nothing)
    [(severity, line), *more] = check_up(app, [("mails", queue(DelaySeconds="60"))])
    assert severity.value == "warning"
    assert line.startswith("W015 mails: DelaySeconds is 60; expected 0. Each task without")
    assert [text.partition(":")[0] for _, text in more] == ["W019 shop.other00 (and 49 more)"]


def test_a_finding_can_be_ignored_with_a_reason(app: Celery) -> None:
    queues = [("mails", queue(DelaySeconds="60"))]
    app.conf.sqs_backoff = {"ignore_findings": {"W015": "we batch"}}
    assert check_up(app, queues) == []
    app.conf.sqs_backoff = {"ignore_findings": {"W015:mails": "we batch"}}
    assert check_up(app, queues) == []
    for invalid in ({"W015": ""}, {"W015:bulk": "we batch"}, ["W015"], None):
        app.conf.sqs_backoff = {"ignore_findings": invalid}
        assert len(check_up(app, queues)) == 1


def test_nothing_is_said_of_a_queue_that_could_not_be_read(app: Celery) -> None:
    assert check_up(app, [("mails", Queue(URL, is_read=False))]) == []


def test_a_bug_is_logged_and_harms_nobody(
    app: Celery, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise LookupError("SECRET")

    monkeypatch.setattr(module, "check_up", broken)
    start_check_up(app, [])
    eventually(lambda: "sqs_backoff.check_up_failed: builtins.LookupError" in caplog.text)
    assert "SECRET" not in caplog.text


def test_a_finding_is_logged_by_its_severity(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    start_check_up(app, [("mails", queue(DelaySeconds="60", MaximumMessageSize="1024"))])
    eventually(lambda: len(caplog.records) == 2)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert caplog.records[0].getMessage().startswith("sqs_backoff.finding: W015 mails")
