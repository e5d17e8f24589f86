"""A worker that stops while the provider is down hands its hidden messages over to the next one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from celery_sqs_backoff import EqualJitter, Provider, SQSBackoffTask
from tests.support.processes import eventually
from tests.support.record import note

from .stage import app_of_this_module

app = app_of_this_module()

MAILS = 50

#: Each message is hidden for longer than this many seconds.
LONG = 800


class Down(Exception):
    """The provider does not answer."""


@app.task(
    name="handover.mail",
    base=SQSBackoffTask,
    bind=True,
    retry_on=Down,
    backoff=EqualJitter(base=1800, cap=1800),
    provider=Provider("mail"),
)
def send(self: Any, number: int, flag: str) -> None:
    is_down = Path(flag).exists()
    note(task=self.name, number=number, failed=is_down)
    if is_down:
        raise Down


def test_deploy_during_outage(make_stage, tmp_path):
    """A deploy during an outage does not delay messages.

    All messages are hidden for about 15 minutes or more. The worker that stops makes them visible,
    and the next worker sends them within seconds.
    """
    stage = make_stage()
    flag = tmp_path / "down"
    flag.touch()
    for number in range(MAILS):
        stage.send("handover.mail", number, str(flag))
    with stage.worker(concurrency=2) as first:
        eventually(lambda: sum(delay > LONG for delay in stage.delays_asked()) >= MAILS, timeout=30)
    handed_over = re.search(r"provider_handed_over: (\d+) of (\d+)", first.log())
    assert handed_over is not None
    confirmed, hidden = map(int, handed_over.groups())
    assert confirmed == hidden >= MAILS - 1, "the worker may have taken one message as a probe"
    flag.unlink()
    with stage.worker(concurrency=2):
        stage.wait_until_settled(timeout=40)
    sent = sorted(run["number"] for run in stage.runs("handover.mail") if not run["failed"])
    assert sent == list(range(MAILS)), "each once"
    assert stage.dead_letters() == []
