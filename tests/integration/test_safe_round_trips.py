"""What a guard costs on Redis, counted by the server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import redis
from celery import Celery

from celery_sqs_backoff import Guard, Retryable, SQSBackoffTask
from celery_sqs_backoff.safe import RecordRejected
from celery_sqs_backoff.safe.guard import enter
from celery_sqs_backoff.store.settings import records_of

from .stores import REDIS_URL, served

pytestmark = pytest.mark.redis


@pytest.fixture
def app(tmp_path: Any) -> Iterator[Celery]:
    with served("redis", tmp_path) as there:
        app = Celery("counted", broker="memory://", set_as_current=False)
        app.finalize()
        app.conf.sqs_backoff = {"store": there.store, "secret": "s"}
        yield app
        app.close()


def test_a_guard_costs_two_round_trips_per_run_and_one_when_it_does_not_run(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for the run after one that was lost, which must keep that one from unsetting it."""
    sent: list[str] = []
    send = redis.Connection.send_packed_command

    def count(self: Any, command: Any, *args: Any, **options: Any) -> Any:
        sent.append("command")
        return send(self, command, *args, **options)

    guard = Guard(key="mail:{customer}", window=60)

    @app.task(shared=False, base=SQSBackoffTask, name="mail", guard=guard)
    def mail(customer: int) -> str:
        if ends:
            raise ends.pop()
        return "sent"

    def cost(customer: int, task_id: str) -> int:
        sent.clear()
        with suppress(KeyboardInterrupt):  # as SIGKILL would
            mail.apply((customer,), task_id=task_id)
        return len(sent)

    ends: list[BaseException] = []
    mail.apply((-1,))
    ends = [Retryable()]
    mail.apply((-2,))  # all scripts are loaded
    monkeypatch.setattr(redis.Connection, "send_packed_command", count)
    ends = []
    assert cost(1, "first") == 2
    assert cost(1, "first") == 1, "it is done"
    assert cost(1, "second") == 1, "it is refused"
    ends = [Retryable()]
    assert cost(2, "first") == 2
    ends = [KeyboardInterrupt()]
    assert cost(3, "first") == 1
    ends = [KeyboardInterrupt()]
    assert cost(3, "first") == 2, "joined"
    ends = []
    assert cost(3, "first") == 2, "joined again, and done"


def test_a_record_that_is_not_text_is_rejected(app: Celery) -> None:
    """Whoever can write to Redis can write anything."""
    records = records_of(app)
    enter(records, "mail:7", "message", "run 1", 60)
    raw = redis.Redis.from_url(REDIS_URL)
    for key in raw.scan_iter("*"):
        raw.set(key, b"\xff\x00", keepttl=True)
    with pytest.raises(RecordRejected):
        enter(records, "mail:7", "message", "run 2", 60)
