"""A run that changes its arguments in place, and says that it goes on with them."""

from __future__ import annotations

import time

import pytest
from celery import Celery
from celery.app.trace import build_tracer

from celery_sqs_backoff import SQSBackoffTask
from celery_sqs_backoff.retry.decision import RetryIn
from celery_sqs_backoff.sqs.delivery import Delivery
from celery_sqs_backoff.task.handover import DELIVERY_KEY, report_of


class Down(Exception):
    pass


@pytest.fixture
def published(monkeypatch):
    """Arguments that Celery publishes."""
    found = []
    monkeypatch.setattr(
        "celery.canvas.Signature.apply_async",
        lambda self, *a, **k: found.append((list(self.args), dict(self.kwargs))),
    )
    return found


def run(body, *args, **kwargs):
    """Run a task for a message, by Celery's own tracer; return its word."""
    app = Celery("arguments", broker="memory://", set_as_current=False)
    task = app.task(base=SQSBackoffTask, bind=True, lazy=False, shared=False)(body)
    task.__trace__ = build_tracer(task.name, task, app=app)
    url = "https://sqs.example/1/q"
    delivery = Delivery(message_id="m", queue_url=url, received_at=time.time())
    info = {"exchange": "", "routing_key": "q"}
    request = {"id": "task-id", "retries": 0, "delivery_info": info, DELIVERY_KEY: delivery}
    retval = task.__trace__("task-id", list(args), kwargs, request).retval
    return report_of(retval).ended.word


def mails(self, recipients):
    recipients.pop(0)
    raise self.retry(args=[recipients], exc=Down(), countdown=1)


def mails_by_name(self, recipients):
    recipients.pop(0)
    raise self.retry(kwargs={"recipients": recipients}, exc=Down(), countdown=1)


def pages(self, page):
    self.request.kwargs["page"] += 1
    raise self.retry(kwargs=self.request.kwargs, countdown=1)


def test_what_a_run_has_changed_in_place_is_published(published):
    """The message was kept: its next run sent the first mail again."""
    assert run(mails, ["a", "b"]) is None
    assert run(mails_by_name, recipients=["a", "b"]) is None
    assert run(pages, page=1) is None
    assert published == [([["b"]], {}), ([], {"recipients": ["b"]}), ([], {"page": 2})]


def again(self, recipients):
    raise self.retry(args=[recipients], exc=Down(), countdown=1)


def as_it_was_sent(self, recipients):
    recipients.pop(0)
    raise self.retry(exc=Down(), countdown=1)


def test_the_same_text_or_no_arguments_keep_the_message(published):
    assert isinstance(run(again, "a"), RetryIn)
    assert isinstance(run(as_it_was_sent, ["a", "b"]), RetryIn)
    assert published == []


def test_a_list_that_is_named_is_published(published):
    """Nobody can tell whether the run has changed it."""
    assert run(again, ["a", "b"]) is None
    assert published == [([["a", "b"]], {})]
