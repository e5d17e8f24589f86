"""Providers of several tenants."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from celery_sqs_backoff import FullJitter, Provider, SQSBackoffTask
from tests.support.processes import eventually
from tests.support.record import note
from tests.support.workers import Worker

from .stage import Stage, app_of_this_module

app = app_of_this_module()


class Down(Exception):
    """The provider does not answer."""


options: dict[str, Any] = {
    "base": SQSBackoffTask,
    "bind": True,
    "retry_on": Down,
    "backoff": FullJitter(base=1, cap=60),
}


by_account = Provider("parcels", key="account", probe_interval=0.5, longest_probe_interval=0.5)


@app.task(name="fleet.parcel", provider=by_account, **options)
def book(self: Any, account: str, number: int, flag: str) -> None:
    is_down = Path(flag).exists()
    note(task=self.name, account=account, number=number, failed=is_down)
    if is_down:
        raise Down


@app.task(name="fleet.other", base=SQSBackoffTask)
def other() -> None:
    """Makes the queue one of several tasks: while a provider is down all is received."""


def probes_of(*workers: Worker) -> int:
    return sum(worker.log().count("provider_probing") for worker in workers)


def test_a_tenant_that_is_down_leaves_the_others_alone(
    make_stage: Callable[..., Stage], tmp_path: Path
) -> None:
    stage = make_stage()
    down_for = {account: tmp_path / account for account in ("a", "b", "c")}
    down_for["a"].touch()
    for number in range(20):
        for account, flag in down_for.items():
            stage.send("fleet.parcel", account, number, str(flag))

    def booked(account: str) -> list[int]:
        runs = [run for run in stage.runs("fleet.parcel") if run["account"] == account]
        return sorted(run["number"] for run in runs if not run["failed"])

    with stage.worker() as worker:
        eventually(lambda: "provider_down: parcels[" in worker.log(), timeout=20)
        eventually(lambda: booked("b") == booked("c") == list(range(20)), timeout=20)
        calls = [run for run in stage.runs("fleet.parcel") if run["account"] == "a"]
        assert len(calls) <= 6 + 8 + probes_of(worker), "threshold, prefetched, probes"
        assert booked("a") == []
        down_for["a"].unlink()
        stage.wait_until_settled(timeout=40)
    assert booked("a") == list(range(20)), "each once"
    assert worker.log().count("provider_down") == 1
