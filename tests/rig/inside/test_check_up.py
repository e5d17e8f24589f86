"""The cheap half of the doctor at a worker's start: a line per rule; it stops no worker."""

from __future__ import annotations

import json
import logging
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
    """Never run."""


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
                "MaximumMessageSize": "1048576",
                "RedrivePolicy": redrive("arn:aws:sqs:eu-central-1:1:mails-dlq"),
            }
            return {"Attributes": {**found, **attributes}}

    return read_queue(Client(), url)  # type: ignore[arg-type]


def test_a_good_queue_is_not_spoken_of(app: Celery) -> None:
    assert check_up(app, [("mails", queue())]) == []


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"VisibilityTimeout": "0"}, "E011 mails: VisibilityTimeout is 0"),
        ({"RedrivePolicy": ""}, "W002 mails: the queue has no RedrivePolicy"),
        (
            {"RedrivePolicy": redrive("arn:aws:sqs:eu-central-1:1:mails-dlq", 50)},
            "W010 mails: maxReceiveCount is 50; 99 of 100 messages of shop.mail need up to",
        ),
    ],
    ids=lambda value: value.partition(" ")[0] if isinstance(value, str) else "",
)
def test_a_fault_of_a_queue_has_a_line(app: Celery, attributes: dict[str, str], said: str) -> None:
    [(_, line)] = check_up(app, [("mails", queue(**attributes))])
    assert line.startswith(said)


def test_the_receives_of_a_fifo_queue_are_counted_with_the_tasks_fifo_cap(app: Celery) -> None:
    policy = redrive("arn:aws:sqs:eu-central-1:1:mails-dlq.fifo", 100)
    [(_, line)] = check_up(app, [("mails.fifo", queue(f"{URL}.fifo", RedrivePolicy=policy))])
    assert line.startswith("W010 mails.fifo: maxReceiveCount is 100;")


def by_name(name: str, *_: Any, **__: Any) -> str | None:
    return {"shop.mail": "bulk", "shop.ping": "mails"}.get(name)


def by_arguments(name: str, args: Any, kwargs: Any, options: Any, **_: Any) -> Any:
    return {"queue": kwargs["customer"]}


@pytest.mark.parametrize(
    ("routes", "rules"),
    [
        ({"shop.mail": {"queue": "bulk"}}, []),
        ({"shop.m*": "bulk"}, []),
        (by_name, []),
        ({"shop.p*": "mails"}, []),
        ({"shop.p*": "mails", "shop.m*": {"exchange": "mails"}}, ["W010"]),
        ({"shop.p*": "mails", "shop.m*": {"exchange": "m", "routing_key": "m"}}, ["E037", "W010"]),
        (by_arguments, ["W010"]),
        (None, ["W010"]),
    ],
    ids=[
        "map",
        "pattern",
        "function",
        "default",
        "exchange",
        "key",
        "looks at the arguments",
        "none",
    ],
)
def test_a_queue_needs_no_receives_for_tasks_that_are_routed_elsewhere(
    app: Celery, routes: Any, rules: list[str]
) -> None:
    app.task(base=SQSBackoffTask, name="shop.ping", max_retries=2, shared=False)(nothing)
    app.conf.task_routes = routes
    policy = redrive("arn:aws:sqs:eu-central-1:1:mails-dlq", 5)
    found = check_up(app, [("mails", queue(RedrivePolicy=policy))])
    assert [line.split()[0] for _, line in found] == rules


@pytest.mark.parametrize(("default", "rules"), [("mails", ["W010"]), ("celery", [])])
def test_a_task_that_nothing_routes_counts_for_the_default_queue(
    app: Celery, default: str, rules: list[str]
) -> None:
    app.task(base=SQSBackoffTask, name="shop.ping", max_retries=2, shared=False)(nothing)
    app.conf.update(task_default_queue=default, task_routes={"shop.ping": "mails"})
    policy = redrive("arn:aws:sqs:eu-central-1:1:mails-dlq", 5)
    found = check_up(app, [("mails", queue(RedrivePolicy=policy))])
    assert [line.split()[0] for _, line in found] == rules


def test_a_task_with_a_queue_of_its_own_counts_for_no_other(app: Celery) -> None:
    app.tasks["shop.mail"].queue = "bulk"
    app.task(base=SQSBackoffTask, name="shop.ping", max_retries=2, shared=False)(nothing)
    policy = redrive("arn:aws:sqs:eu-central-1:1:mails-dlq", 5)
    assert check_up(app, [("mails", queue(RedrivePolicy=policy))]) == []


@pytest.mark.parametrize("name", ["mails", "an alias of it"])
def test_a_task_counts_for_a_queue_that_beat_names(app: Celery, name: str) -> None:
    app.task(base=SQSBackoffTask, name="shop.ping", max_retries=2, shared=False)(nothing)
    app.conf.task_routes = {"shop.ping": "mails"}
    app.conf.task_queues = [KombuQueue("mails", alias="an alias of it")]
    entry = {"task": "shop.mail", "schedule": 60, "options": {"queue": name}}
    app.conf.beat_schedule = {"nightly": entry}
    policy = redrive("arn:aws:sqs:eu-central-1:1:mails-dlq", 5)
    found = check_up(app, [("mails", queue(RedrivePolicy=policy))])
    assert [line.split()[0] for _, line in found] == ["W010"]


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


def test_a_worker_that_chooses_its_concurrency_is_checked_too(app: Celery) -> None:
    app.conf.worker_concurrency = "auto"  # Celery 5.7
    assert check_up(app, []) == []


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
