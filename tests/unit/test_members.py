"""Methods of a task that we wrap, of any kind that Celery can call."""

from __future__ import annotations

from functools import partial

import pytest
from celery import Celery
from celery.app.trace import build_tracer

from celery_sqs_backoff import SQSBackoffTask

from .test_task import received

CALLED: list[str] = []


def note(what, *_):
    CALLED.append(what)


class Plain(SQSBackoffTask):
    abstract = True

    def before_start(self, task_id, args, kwargs):
        note("before_start")

    def on_failure(self, exc, task_id, args, kwargs, einfo):
        note("on_failure")


class Static(SQSBackoffTask):
    abstract = True

    @staticmethod
    def before_start(task_id, args, kwargs):
        note("before_start")

    @staticmethod
    def on_failure(exc, task_id, args, kwargs, einfo):
        note("on_failure")


class OfClass(SQSBackoffTask):
    abstract = True

    @classmethod
    def before_start(cls, task_id, args, kwargs):
        note("before_start")

    @classmethod
    def on_failure(cls, exc, task_id, args, kwargs, einfo):
        note("on_failure")


class Partial(SQSBackoffTask):
    abstract = True
    before_start = staticmethod(partial(note, "before_start"))
    on_failure = staticmethod(partial(note, "on_failure"))


@pytest.mark.parametrize("base", [Plain, Static, OfClass, Partial])
def test_a_hook_may_be_static_or_of_the_class(base):
    """``before_start`` got one argument too many: each message became a dead letter, never run."""
    app = Celery("members", broker="memory://", set_as_current=False)

    @app.task(base=base, lazy=False, shared=False)
    def mail():
        note("run")
        raise KeyError("x")

    CALLED.clear()
    with received(mail):
        mail.before_start("task-id", (), {})
        mail.on_failure(KeyError("x"), "task-id", (), {}, None)
    assert CALLED == ["before_start", "on_failure"]
    CALLED.clear()
    build_tracer(mail.name, mail, app=app)("task-id", (), {}, {"id": "task-id"})
    assert CALLED == ["before_start", "run", "on_failure"]
