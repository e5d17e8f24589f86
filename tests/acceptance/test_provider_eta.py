"""A task that Celery has made wait (ETA, `rate_limit`) asks its provider when it starts."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from celery_sqs_backoff import FullJitter, Provider, SQSBackoffTask
from tests.support.processes import eventually
from tests.support.record import note

from .stage import Stage, app_of_this_module

app = app_of_this_module()

MAILS = 40
RATE = 10


class Down(Exception):
    """The provider does not answer."""


options: dict[str, Any] = {
    "base": SQSBackoffTask,
    "bind": True,
    "retry_on": Down,
    "backoff": FullJitter(base=1, cap=60),
    "provider": Provider("mail", probe_interval=2, longest_probe_interval=2),
}


def send(self: Any, number: int, flag: str) -> None:
    is_down = Path(flag).exists()
    note(task=self.name, number=number, failed=is_down)
    if is_down:
        raise Down


app.task(name="eta.mail", **options)(send)
app.task(name="eta.limited", rate_limit="4/s", **options)(send)


@app.task(name="eta.other", base=SQSBackoffTask)
def other() -> None:
    """Makes the queue one of several tasks: while the provider is down all is received."""


@app.task(name="eta.paced", base=SQSBackoffTask, provider=Provider("paced", rate=RATE))
def paced(number: int) -> None:
    note(task="eta.paced", number=number)


def in_seconds(seconds: float) -> datetime:
    return datetime.now(timezone.utc) + timedelta(seconds=seconds)


def test_messages_with_one_eta_start_at_the_agreed_rate(make_stage: Callable[..., Stage]) -> None:
    """A newsletter at nine: the worker holds all of it before, and may not send it in one go."""
    stage = make_stage()
    eta = in_seconds(10)
    with stage.worker(concurrency=4):
        for number in range(MAILS):
            stage.send("eta.paced", number, eta=eta)
        stage.wait_until_settled(timeout=40)
    at = sorted(run["at"] for run in stage.runs("eta.paced"))
    assert sorted(run["number"] for run in stage.runs("eta.paced")) == list(range(MAILS))
    busiest = max(sum(now <= later < now + 1 for later in at) for now in at)
    assert busiest <= RATE + 4, "a busy machine starts a few late"


def test_an_outage_keeps_tasks_that_waited_in_celery_from_running(
    make_stage: Callable[..., Stage], tmp_path: Path
) -> None:
    """The first waits for an ETA become due, and pass the rate limit, while it is down."""
    stage = make_stage()
    flag = tmp_path / "down"
    flag.touch()
    with stage.worker() as worker:
        for number in range(MAILS):
            stage.send("eta.mail", number, str(flag), eta=in_seconds(10))
        for number in range(MAILS, 2 * MAILS):
            stage.send("eta.limited", number, str(flag))

        def numbers(*, failed: bool) -> list[int]:
            runs = stage.runs("eta.mail") + stage.runs("eta.limited")
            return sorted(run["number"] for run in runs if run["failed"] is failed)

        eventually(lambda: "provider_down" in worker.log(), timeout=20)
        eventually(lambda: sum(d > 20 for d in stage.delays_asked()) >= 1.8 * MAILS, timeout=30)
        most = 6 + 8 + worker.log().count("provider_probing")
        assert len(numbers(failed=True)) <= most, "threshold, runs under way, probes"
        flag.unlink()
        stage.wait_until_settled(timeout=40)
    assert numbers(failed=False) == list(range(2 * MAILS)), "each once"
