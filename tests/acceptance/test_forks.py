"""A prefork worker lets no process begin while it sets up a TLS connection."""

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
    """A worker guards its forks.

    A process inherits from the worker that its guard was set when it was forked.
    """
    stage = make_stage()
    stage.send("forks.guarded")
    with stage.worker(concurrency=1):
        stage.wait_until_settled()
    assert [run["guards"] for run in stage.runs("forks.guarded")] == [1]
