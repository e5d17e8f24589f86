"""A redrive that is killed at random moments goes on from its journal in the next run."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery_sqs_backoff.testing import local_sqs_settings
from tests.support.processes import eventually

if TYPE_CHECKING:
    from mypy_boto3_sqs.client import SQSClient

MESSAGES = 400

#: Four threads of a redrive send at the same time, each a batch of ten messages.
UNDER_WAY = 4 * 10

#: For more kills: ``REDRIVE_KILLS=20 python -m pytest tests/acceptance/test_redrive_kill.py``.
KILLS = int(os.environ.get("REDRIVE_KILLS", "5"))


def test_random_kills(sqs, proxy, queue, tmp_path):
    """A redrive that is killed at random moments loses no message.

    It sends a message twice only if it has reported this message as in doubt.
    """
    body_of = fill(sqs, queue.dlq.url)
    proxy.set_latency(4)
    journal, output = tmp_path / "journal", tmp_path / "events"
    output.touch()
    settings = json.dumps(local_sqs_settings(proxy.endpoint, queue))
    command = [sys.executable, "-m", "tests.acceptance.redrive_child", settings, queue.dlq.name]
    rng = random.Random(7)

    def start():
        return subprocess.Popen([*command, str(journal), str(output)])

    for kill in range(KILLS):
        wanted = sum(map(len, journal_ids(journal, "sent"))) + rng.randint(
            1, max(2, MESSAGES // KILLS - 10)
        )
        child = start()
        try:
            eventually(
                lambda wanted=wanted, child=child: (
                    child.poll() is not None
                    or sum(map(len, journal_ids(journal, "sent"))) >= wanted
                ),
                interval=rng.uniform(0.001, 0.004),
                timeout=60,
            )
        finally:
            child.kill()
            child.wait()
        assert child.returncode == -9, f"run {kill} had ended before it was killed"
    doubt_before_last = named_in_doubt(output)
    last = start()
    assert last.wait(60) == 0

    copies = Counter(drain(sqs, queue.url))
    named = {body_of[id_] for id_ in named_in_doubt(output)}
    assert set(copies) == set(body_of.values())  # no message is lost
    assert {body for body, count in copies.items() if count > 1} <= named
    assert len(doubt_before_last) <= KILLS * UNDER_WAY
    assert not drain(sqs, queue.dlq.url)


def fill(sqs: SQSClient, url: str) -> dict[str, str]:
    """Send messages to a queue, and return their bodies by message ID."""
    found: dict[str, str] = {}
    for start in range(0, MESSAGES, 10):
        bodies = [json.dumps({"n": n}) for n in range(start, start + 10)]
        answer = sqs.send_message_batch(
            QueueUrl=url,
            Entries=[{"Id": str(i), "MessageBody": body} for i, body in enumerate(bodies)],
        )
        found |= {entry["MessageId"]: bodies[int(entry["Id"])] for entry in answer["Successful"]}
    return found


def drain(sqs: SQSClient, url: str) -> list[str]:
    found: list[str] = []
    while batch := sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10).get("Messages"):
        for message in batch:
            found.append(message["Body"])
            sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
    return found


def journal_ids(journal: Path, kind: str) -> list[list[str]]:
    lines = journal.read_text().split("\n")[:-1] if journal.exists() else []
    found: list[Any] = [json.loads(line) for line in lines]
    return [line["ids"] for line in found if line.get("is") == kind]


def named_in_doubt(output: Path) -> set[str]:
    lines = output.read_text().split("\n")[:-1]
    events = [json.loads(line) for line in lines]
    return {id_ for event in events if event["event"] == "InDoubt" for id_ in event["ids"]}
