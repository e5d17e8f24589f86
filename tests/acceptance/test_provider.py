"""A provider that is down: few calls meanwhile, and everything soon afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from celery_sqs_backoff import FullJitter, Outcome, Provider, SQSBackoffTask
from tests.support.processes import eventually
from tests.support.record import note

from .stage import Stage, app_of_this_module

app = app_of_this_module()

MAILS = 60


class Down(Exception):
    """The provider does not answer."""


def send(task: Any, number: int, flag: str) -> None:
    is_down = Path(flag).exists()
    note(task=task.name, number=number, failed=is_down)
    if is_down:
        raise Down


options: dict[str, Any] = {
    "base": SQSBackoffTask,
    "bind": True,
    "retry_on": Down,
    "backoff": FullJitter(base=1, cap=60),
}
provider = Provider("mail", probe_interval=1, longest_probe_interval=4)


def in_doubt(exc: BaseException) -> Outcome | None:
    """As ``requests_errors()`` classifies a 502: a gateway had passed the request on."""
    return Outcome.UNKNOWN if isinstance(exc, Down) else None


@app.task(name="provider.poll", bind=True, base=SQSBackoffTask, provider="report")
def poll(self: Any, number: int) -> None:
    """Ask a provider that is well for a report that is not ready."""
    note(task=self.name, number=number)
    raise self.retry(countdown=2, max_retries=None)


@app.task(name="provider.fetch", bind=True, base=SQSBackoffTask, provider="report")
def fetch(self: Any, number: int) -> None:
    note(task=self.name, number=number, began=time.time())


app.task(name="provider.mail", provider=provider, **options)(send)
app.task(name="provider.other", **options)(send)
app.task(name="provider.in_doubt", classify=in_doubt, provider=Provider("bad gateway"), **options)(
    send
)


def test_an_outage_costs_few_calls_and_is_over_soon(
    make_stage: Callable[..., Stage], tmp_path: Path
) -> None:
    """Held for 45 s and more while it was down; recalled within seconds when it is not."""
    stage = make_stage()
    flag = tmp_path / "down"
    flag.touch()
    for number in range(MAILS):
        stage.send("provider.mail", number, str(flag))
    with stage.worker(concurrency=2):
        eventually(lambda: stage.messages()[0] == 0, timeout=30)
        time.sleep(5)  # the outage lasts
        calls = [run for run in stage.runs("provider.mail") if run["failed"]]
        assert len(calls) <= 25, "threshold, runs under way, probes"
        stage.send("provider.other", 1, str(tmp_path / "up"))
        eventually(lambda: stage.runs("provider.other"), timeout=10)
        flag.unlink()
        began = time.monotonic()
        stage.wait_until_settled(timeout=40)
        took = time.monotonic() - began
    sent = sorted(run["number"] for run in stage.runs("provider.mail") if not run["failed"])
    assert sent == list(range(MAILS)), "each once"
    assert stage.dead_letters() == []
    assert took < 40


def test_an_outage_that_leaves_calls_in_doubt_costs_few_messages(
    make_stage: Callable[..., Stage], tmp_path: Path
) -> None:
    """Each call that a gateway answers with 502 is in doubt, and its message is given up."""
    stage = make_stage()
    flag = tmp_path / "down"
    flag.touch()
    for number in range(120):
        stage.send("provider.in_doubt", number, str(flag))
    with stage.worker(pool="threads", concurrency=4):
        eventually(lambda: stage.messages()[0] == 0, timeout=30)
    assert len(stage.dead_letters()) <= 20, "six, those under way, and probes"


def test_tasks_that_poll_hold_up_no_others(make_stage: Callable[..., Stage]) -> None:
    """A retry without an error is no failure of the provider."""
    stage = make_stage()
    for number in range(12):
        stage.send("provider.poll", number)
    with stage.worker(pool="threads", concurrency=4) as worker:
        eventually(lambda: len(stage.runs("provider.poll")) >= 24, timeout=30)
        sent_at = time.time()
        stage.send("provider.fetch", 1)
        eventually(lambda: stage.runs("provider.fetch"), timeout=20)
        (run,) = stage.runs("provider.fetch")
        assert run["began"] - sent_at < 5
        assert "provider_" not in worker.log()
