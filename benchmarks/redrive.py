"""How fast is a redrive, what does it cost in calls, how exact is its rate, and how much memory?

    python -m benchmarks.redrive

Each measurement moves messages of a new queue on a local SQS (ministack) behind a proxy that adds
a latency to each call. The plain loop is what one writes with boto3: receive ten, send a batch,
delete a batch, one thread. Both run in turns, and in processes of their own.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

import click
from celery import Celery

from celery_sqs_backoff import redrive
from celery_sqs_backoff.redrive.broker import Endpoint
from celery_sqs_backoff.redrive.journal import Journal
from celery_sqs_backoff.redrive.letter import Letter
from celery_sqs_backoff.redrive.run import Run
from celery_sqs_backoff.redrive.settings import Settings
from celery_sqs_backoff.redrive.source import QueueSource
from celery_sqs_backoff.testing import LocalQueue, create_local_queue, local_sqs_settings
from tests.support.fault_proxy import FaultProxy, fault_proxy
from tests.support.servers import ministack, sqs_client

if TYPE_CHECKING:
    from mypy_boto3_sqs.client import SQSClient

__all__ = ["main"]

LATENCY_MS = 20
OUTPUT = Path("demo-output", "bench-redrive.json")


def plain_loop(client: SQSClient, queue: LocalQueue) -> int:
    """The loop to compare with."""
    assert queue.dlq is not None
    moved = 0
    while batch := client.receive_message(QueueUrl=queue.dlq.url, MaxNumberOfMessages=10).get(
        "Messages"
    ):
        client.send_message_batch(
            QueueUrl=queue.url,
            Entries=[{"Id": str(i), "MessageBody": m["Body"]} for i, m in enumerate(batch)],
        )
        client.delete_message_batch(
            QueueUrl=queue.dlq.url,
            Entries=[
                {"Id": str(i), "ReceiptHandle": m["ReceiptHandle"]} for i, m in enumerate(batch)
            ],
        )
        moved += len(batch)
    return moved


def move(kind: str, endpoint: str, name: str, url: str, dlq: str, rate: str) -> None:
    """In a process of its own: move everything, and print what it took."""
    queue = LocalQueue(name=name, url=url, arn="", dlq=LocalQueue(name=dlq, url=dlq, arn=""))
    began = time.perf_counter()
    if kind == "plain":
        moved = plain_loop(sqs_client(endpoint), queue)
    else:
        app = Celery("bench", set_as_current=False)
        app.conf.update(local_sqs_settings(endpoint, queue))
        moved = redrive(app, name, rate=rate or None).sent
    seconds = time.perf_counter() - began
    print(
        json.dumps(
            {
                "moved": moved,
                "seconds": seconds,
                "peak_kib": _status("VmHWM"),
            }
        )
    )


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    return 0


def memory(messages: str) -> None:
    """In a process of its own: the engine, with a journal, on a queue that takes no memory itself.

    (Local servers look through their whole queue for each receive: 100,000 messages take hours.)
    """
    with TemporaryDirectory() as directory:
        source = _Endless(int(messages))
        journal = Journal(Path(directory, "journal"), source=source.url, run_id="bench")
        run = Run(
            source,
            _Nowhere(),
            Settings(),
            journal=journal,
            archive=None,
            retention_seconds=None,
            hold_seconds=30,
            run_id="bench",
        )
        with journal:
            moved = run().sent
    print(json.dumps({"moved": moved, "peak_kib": _status("VmHWM")}))


class _Endless(QueueSource):
    """A queue that makes its messages as they are received. Their holds are the real ones."""

    def __init__(self, messages: int) -> None:
        self._numbers = iter(range(messages))
        self._lock = threading.Lock()
        self._left = messages
        super().__init__(cast(Endpoint, self), hold_seconds=30)
        self.client = self

    name, url = "endless", "memory://endless"

    def count(self) -> int:
        return self._left

    def receive_message(self, *, MaxNumberOfMessages: int, **_: Any) -> Any:  # noqa: N803
        with self._lock:
            found = list(islice(self._numbers, MaxNumberOfMessages))
        return {
            "Messages": [
                {"MessageId": str(uuid4()), "ReceiptHandle": "h" * 200, "Body": f"{n}" + "x" * 300}
                for n in found
            ]
        }

    def delete_message_batch(self, *, Entries: Sequence[Any], **_: Any) -> Any:  # noqa: N803
        with self._lock:
            self._left -= len(Entries)
        return {}


class _Nowhere(Endpoint):
    """A queue that takes everything and keeps nothing; and the way there."""

    unknown = ""

    def __init__(self) -> None:
        self.url = "memory://nowhere"
        self.default = self

    def destination(self, letter: Letter) -> Endpoint:
        return self

    @property
    def client(self) -> Any:
        return self

    def send_message_batch(self, *, Entries: Sequence[Any], **_: Any) -> Any:  # noqa: N803
        return {"Successful": [{"Id": entry["Id"]} for entry in Entries]}


def run_child(*arguments: str) -> dict[str, Any]:
    """Run a function of this module in a process of its own; what it has printed."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.redrive", *arguments],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


class Bench:
    """A server with a proxy in front of it."""

    def __init__(self, client: SQSClient, proxy: FaultProxy) -> None:
        self._client = client
        self._proxy = proxy

    def run(self, kind: str, messages: int, *, rate: str = "") -> dict[str, Any]:
        """Fill a new dead-letter queue, let a child empty it; what it took, and its calls."""
        queue = create_local_queue(self._client)
        assert queue.dlq is not None
        for start in range(0, messages, 10):
            self._client.send_message_batch(
                QueueUrl=queue.dlq.url,
                Entries=[
                    {"Id": str(i), "MessageBody": json.dumps({"n": start + i}) + "x" * 300}
                    for i in range(min(10, messages - start))
                ],
            )
        self._proxy.reset()
        arguments = [kind, self._proxy.endpoint, queue.name, queue.url, queue.dlq.url, rate]
        found = run_child("move", *arguments)
        assert found["moved"] == messages, found["moved"]
        found["calls"] = {name: count.calls for name, count in self._proxy.counts().items()}
        found["sent_at"] = sorted(self._sent_at(queue)) if rate else []
        for url in (queue.url, queue.dlq.url):
            self._client.delete_queue(QueueUrl=url)
        return found

    def _sent_at(self, queue: LocalQueue) -> Iterator[float]:
        """When the server got each message, seconds."""
        while batch := self._client.receive_message(
            QueueUrl=queue.url,
            MaxNumberOfMessages=10,
            VisibilityTimeout=600,
            MessageSystemAttributeNames=["SentTimestamp"],
        ).get("Messages"):
            for message in batch:
                yield int(message["Attributes"]["SentTimestamp"]) / 1000


def spread(values: Sequence[float], digits: int = 0) -> str:
    return f"{median(values):.{digits}f} [{min(values):.{digits}f}, {max(values):.{digits}f}]"


@click.command()
@click.option("--rounds", default=3, show_default=True, help="Of plain loop and redrive, in turns.")
@click.option("--messages", default=3_000, show_default=True, help="In each round.")
@click.option("--seconds", default=30, show_default=True, help="Of the measurement of the rate.")
@click.option("--large", default=100_000, show_default=True, help="0: no measurement of memory.")
def main(rounds: int, messages: int, seconds: int, large: int) -> None:
    """Measure, print, and write the figures to demo-output/bench-redrive.json."""
    found: dict[str, Any] = {"python": platform.python_version(), "cores": os.cpu_count()}
    with ministack() as endpoint, fault_proxy(endpoint, latency_ms=LATENCY_MS) as proxy:
        bench = Bench(sqs_client(endpoint), proxy)
        speeds: dict[str, list[float]] = {"plain": [], "redrive": []}
        calls: list[float] = []
        for _ in range(rounds):
            for kind, size in (("plain", messages // 3), ("redrive", messages)):
                run = bench.run(kind, size)
                speeds[kind].append(size / run["seconds"])
                if kind == "redrive":
                    calls.append(sum(run["calls"].values()) / size)
        ratio = median(speeds["redrive"]) / median(speeds["plain"])
        print(f"at {LATENCY_MS} ms per call, {rounds} rounds, median [least, most]:")
        print(f"  plain loop   {spread(speeds['plain'])} messages/s")
        print(f"  redrive      {spread(speeds['redrive'])} messages/s, {ratio:.1f} times as fast")
        print(f"  calls        {spread(calls, 4)} per message, of {messages}; the floor is 0.30")
        found |= {"speeds": speeds, "ratio": ratio, "calls_per_message": calls}
        if seconds:
            found["rates"] = [rate_kept(bench, per_second, seconds) for per_second in (10, 200)]
        if large:
            found["memory"] = {}
            for size in (1_000, large):
                done = run_child("memory", str(size))
                assert done["moved"] == size
                found["memory"][str(size)] = done["peak_kib"]
                print(f"  memory       {done['peak_kib'] / 1024:.1f} MiB at most, {size} messages")
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(json.dumps(found, indent=1))
    print(f"written to {OUTPUT}")


def rate_kept(bench: Bench, per_second: int, seconds: int) -> dict[str, float]:
    """How near the rate is to what was asked for, and the most messages of any one second."""
    run = bench.run("redrive", per_second * seconds, rate=f"{per_second}/s")
    times = run["sent_at"]
    rate = (len(times) - 1) / (times[-1] - times[0])
    most, first = 0, 0
    for last, t in enumerate(times):
        while times[first] <= t - 1:
            first += 1
        most = max(most, last - first + 1)
    print(
        f"  rate         {rate:.2f}/s of {per_second}/s asked ({rate / per_second - 1:+.1%}) over"
        f" {seconds} s; the fullest second held {most}"
    )
    return {"asked": per_second, "kept": rate, "most_in_a_second": most}


if __name__ == "__main__":
    if sys.argv[1:2] == ["move"]:
        move(*sys.argv[2:])
    elif sys.argv[1:2] == ["memory"]:
        memory(*sys.argv[2:])
    else:
        main()
