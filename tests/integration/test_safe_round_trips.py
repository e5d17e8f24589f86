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
from celery_sqs_backoff.safe.guard import Run, enter, finish, unset
from celery_sqs_backoff.safe.shared import count_crash
from celery_sqs_backoff.safe.writes import MARK
from celery_sqs_backoff.store.settings import vault_of

from .stores import NAMES, REDIS_URL, served

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


@pytest.mark.parametrize("name", NAMES)
def test_joining_keeps_both_runs_from_unsetting_on_every_store(name: str, tmp_path: Any) -> None:
    with served(name, tmp_path) as there:
        app = Celery("joined", broker="memory://", set_as_current=False)
        app.conf.sqs_backoff = {"store": there.store, "secret": "s"}
        vault = vault_of(app)
        first = enter(vault, "mail:7", Run("message", "run 1", "[7]"), 60)
        assert first.is_ours
        again = enter(vault, "mail:7", Run("message", "run 1", "[7]"), 60)
        assert again.is_ours, "a client library has sent the call twice"
        second = enter(vault, "mail:7", Run("message", "run 2", "[7]"), 60)
        third = enter(vault, "mail:7", Run("message", "run 3", "[7]"), 60)
        assert (second.text, third.text) == (MARK + first.text, MARK + first.text)
        assert not any(unset(vault, passage) for passage in (first, second, third))
        finish(vault, first, "sent")
        done = enter(vault, "mail:7", Run("message", "run 4", "[7]"), 60)
        assert (done.is_done, done.result) == (True, "sent")


def test_a_record_that_is_not_text_is_rejected_and_harms_no_worker(app: Celery) -> None:
    """Whoever can write to Redis can write anything."""
    vault = vault_of(app)
    enter(vault, "mail:7", Run("message", "run 1", "[7]"), 60)
    assert count_crash(app, "m", "mail", "task-id") == 1
    raw = redis.Redis.from_url(REDIS_URL)
    for key in raw.scan_iter("*"):
        raw.set(key, b"\xff\x00", keepttl=True)
    with pytest.raises(RecordRejected):
        enter(vault, "mail:7", Run("message", "run 2", "[7]"), 60)
    assert count_crash(app, "m", "mail", "task-id") == 0
