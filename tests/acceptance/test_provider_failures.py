"""What counts as a failure of a provider, on a real worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from celery_sqs_backoff import Outcome, Provider, SQSBackoffTask
from tests.support.processes import eventually
from tests.support.record import note

from .stage import KILLED, Stage, app_of_this_module

app = app_of_this_module()


class Down(Exception):
    """The provider does not answer."""


def in_doubt(exc: BaseException) -> Outcome | None:
    """Classify as ``requests_errors()`` does with a 502: a gateway had passed the request on."""
    return Outcome.UNKNOWN if isinstance(exc, Down) else None


@app.task(base=SQSBackoffTask, name="charge", classify=in_doubt, provider=Provider("gateway"))
def charge(number: int, flag: str) -> None:
    note(task="charge", number=number)
    if Path(flag).exists():
        raise Down


@app.task(base=SQSBackoffTask, bind=True, name="poll", provider="report")
def poll(self: Any, number: int) -> None:
    """Ask a provider that is well for a report that is not ready."""
    note(task="poll", number=number)
    raise self.retry(countdown=2, max_retries=None)


@app.task(base=SQSBackoffTask, name="fetch", provider="report")
def fetch(number: int) -> None:
    note(task="fetch", number=number, began=time.time())


def test_in_doubt(make_stage: Callable[..., Stage], tmp_path: Path) -> None:
    """An outage that leaves each call in doubt costs at most 20 of 120 messages."""
    stage = make_stage()
    flag = tmp_path / "down"
    flag.touch()
    for number in range(120):
        stage.send("charge", number, str(flag))
    with stage.worker(pool="threads", concurrency=4, **KILLED):
        eventually(lambda: stage.messages()[0] == 0, timeout=30)
        assert len(stage.dead_letters()) <= 20, "six, those under way, and probes"


def test_polling(make_stage: Callable[..., Stage]) -> None:
    """A retry without an error is no failure of the provider, and holds up no other task."""
    stage = make_stage()
    for number in range(12):
        stage.send("poll", number)
    with stage.worker(pool="threads", concurrency=4, **KILLED) as worker:
        eventually(lambda: len(stage.runs("poll")) >= 24, timeout=30)
        sent_at = time.time()
        stage.send("fetch", 1)
        (run,) = eventually(lambda: stage.runs("fetch"), timeout=20)
        assert run["began"] - sent_at < 5
        assert "provider_" not in worker.log()
