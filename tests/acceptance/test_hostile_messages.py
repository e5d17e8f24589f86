"""Messages that somebody has made to harm the worker: it settles them and goes on."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from celery_sqs_backoff import SQSBackoffTask
from tests.support.processes import eventually
from tests.support.record import note

from .stage import Stage, app_of_this_module, stage

if TYPE_CHECKING:
    from mypy_boto3_sqs.client import SQSClient

app = app_of_this_module()

#: Seconds of CPU. Masking took minutes in the worker's main process.
_BUDGET_SECONDS = 5.0


@app.task(name="check_address", base=SQSBackoffTask)
def check_address(address: str) -> None:
    raise ValueError(f"not an address: {address!r}; password=hunter2")


@app.task(name="ordinary", base=SQSBackoffTask)
def ordinary() -> None:
    note(task="ordinary")


@pytest.fixture
def mails(sqs_endpoint: str, sqs: SQSClient, tmp_path: Path) -> Iterator[Stage]:
    with stage(module=__name__, sqs=sqs, endpoint=sqs_endpoint, directory=tmp_path) as found:
        yield found


def send_as_json(mails: Stage, task: str, argument: str) -> None:
    """A task as other languages send it: not in base64, of which ministack takes less."""
    content = base64.b64encode(json.dumps([[argument], {}, {}]).encode()).decode()
    message = {
        "body": content,
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": {"task": task, "id": "1", "argsrepr": "", "kwargsrepr": ""},
        "properties": {
            "body_encoding": "base64",
            "delivery_tag": "1",
            "delivery_info": {"exchange": "", "routing_key": mails.queues[0].name},
        },
    }
    mails.sqs.send_message(QueueUrl=mails.queues[0].url, MessageBody=json.dumps(message))


def cpu_seconds(pid: int) -> float:
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("piece", ["a-", "x-amz-", "token://"])
def test_an_argument_quoted_in_an_exception_does_not_stop_the_worker(
    mails: Stage, piece: str
) -> None:
    """150,000 characters on which the patterns that mask credentials searched for minutes."""
    with mails.worker(stop_timeout=10) as worker:
        before = cpu_seconds(worker.pid)
        send_as_json(mails, "check_address", piece * (150_000 // len(piece)))
        mails.wait_until_settled(timeout=60)
        mails.send("ordinary")
        eventually(lambda: mails.runs("ordinary"), timeout=30)
        assert cpu_seconds(worker.pid) - before < _BUDGET_SECONDS
        assert worker.stop() == 0
    [letter] = mails.dead_letters()
    assert letter.record is not None
    assert letter.record["exception_message"].startswith("not an address: '")
    assert len(letter.record["exception_message"]) < 1_010
    assert letter.record["traceback"].endswith("password=***\n")
    assert "hunter2" not in str(letter.record)


def test_a_huge_name_does_not_flood_the_log(mails: Stage) -> None:
    """A task that no worker has, with a name of 60,000 characters and a forged log line."""
    name = "x" * 150 + "\n[ERROR] all mails are lost " + "y" * 60_000
    with mails.worker() as worker:
        mails.send(name)
        eventually(lambda: "sqs_backoff.not_understood" in worker.log(), timeout=30)
        log = worker.log()
        assert "y" * 200 not in log
        assert not [line for line in log.splitlines() if line.startswith("[ERROR]")]
