"""On a FIFO queue, hidden messages come back early after an outage, and groups keep their order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from celery_sqs_backoff import EqualJitter, Provider, SQSBackoffTask
from tests.support.processes import eventually
from tests.support.record import note

from .stage import app_of_this_module

app = app_of_this_module()

GROUPS, MAILS = 6, 8


class Down(Exception):
    """The provider does not answer."""


@app.task(
    name="fifo.mail",
    base=SQSBackoffTask,
    bind=True,
    retry_on=Down,
    backoff=EqualJitter(base=600, cap=600),
    provider=Provider("mail", failures=3, probe_interval=2),
)
def send(self: Any, group: str, number: int, flag: str) -> None:
    is_down = Path(flag).exists()
    note(task=self.name, group=group, number=number, failed=is_down)
    if is_down:
        raise Down


def test_groups_come_forward_in_order(make_stage, tmp_path):
    """After an outage the worker brings hidden messages forward, and each group keeps its order.

    During the outage, the first message of each group is hidden for at least five minutes.
    """
    stage = make_stage(queues={"test": {"fifo": True, "max_receive_count": 100}})
    flag = tmp_path / "down"
    flag.touch()
    for group in map(str, range(GROUPS)):
        for number in range(MAILS):
            one = f"{group}-{number}"
            properties = {"MessageGroupId": group, "MessageDeduplicationId": one}
            stage.send("fifo.mail", group, number, str(flag), **properties)
    with stage.worker() as worker:
        eventually(lambda: "provider_paused" in worker.log(), timeout=20)
        eventually(lambda: sum(d > 200 for d in stage.delays_asked()) >= GROUPS, timeout=20)
        flag.unlink()
        stage.wait_until_settled(timeout=60)
    for group in map(str, range(GROUPS)):
        runs = [run for run in stage.runs("fifo.mail") if run["group"] == group]
        sent = [run["number"] for run in runs if not run["failed"]]
        assert sent == list(range(MAILS)), "each once, in order"
