"""A queue that brings only messages of one provider is not received from while that is down."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from celery_sqs_backoff import FullJitter, Provider, SQSBackoffTask
from tests.support.processes import eventually
from tests.support.record import note

from .stage import Stage, app_of_this_module

app = app_of_this_module()

MAILS = 60
PROBES = 4


class Down(Exception):
    """The provider does not answer."""


@app.task(
    name="queue.mail",
    base=SQSBackoffTask,
    bind=True,
    retry_on=Down,
    backoff=FullJitter(base=1, cap=60),
    provider=Provider("mail", probe_interval=1, longest_probe_interval=1),
)
def send(self: Any, number: int, flag: str) -> None:
    is_down = Path(flag).exists()
    note(task=self.name, number=number, failed=is_down)
    if is_down:
        raise Down


def test_a_queue_of_one_provider_is_received_from_for_probes_only(
    make_stage: Callable[..., Stage], tmp_path: Path
) -> None:
    stage = make_stage()
    assert stage.proxy is not None
    stage.proxy.record("ReceiveMessage")
    flag = tmp_path / "down"
    flag.touch()
    for number in range(MAILS):
        stage.send("queue.mail", number, str(flag))

    def receives() -> int:
        assert stage.proxy is not None
        return len(stage.proxy.requests("ReceiveMessage"))

    def probes() -> int:
        return worker.log().count("provider_probing")

    with stage.worker() as worker:
        eventually(probes, timeout=20)
        probes_before, receives_before = probes(), receives()
        eventually(lambda: probes() >= probes_before + PROBES, timeout=20)
        received = receives() - receives_before
        # One for each, and perhaps another before Celery's loop has seen the first.
        assert received <= 2 * (probes() - probes_before) + 1
        assert stage.messages()[0] >= MAILS // 2, "the others wait, visible, and cost nothing"
        flag.unlink()
        stage.wait_until_settled(timeout=40)
    sent = sorted(run["number"] for run in stage.runs("queue.mail") if not run["failed"])
    assert sent == list(range(MAILS)), "each once"
