"""A prefork worker starts no pool process while one of its threads sets up a TLS connection."""

from __future__ import annotations

from celery_sqs_backoff import SQSBackoffTask
from celery_sqs_backoff.sqs.handshakes import guard_forks
from tests.support.record import note

from .stage import app_of_this_module

app = app_of_this_module()


@app.task(base=SQSBackoffTask, name="forks.guarded")
def guarded() -> None:
    note(task="forks.guarded", guards=guard_forks.cache_info().currsize)


def test_forks(make_stage):
    """A worker installs its fork guard once, before it starts its first pool process.

    The pool process inherits the guard, so its task can see the guard.
    """
    stage = make_stage()
    stage.send("forks.guarded")
    with stage.worker(concurrency=1):
        stage.wait_until_settled()
    assert [run["guards"] for run in stage.runs("forks.guarded")] == [1]
