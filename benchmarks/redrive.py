"""Measure the speed of a redrive, its number of calls, its rate and its memory.

    python -m benchmarks.redrive

Each measurement moves the messages of a new queue on a local SQS (ministack), behind a proxy that
adds a latency to each call. A redrive is compared with a plain loop, which uses boto3 in one
thread: it receives ten messages, sends them as a batch and deletes them as a batch. Both run in
turns, each in a new process.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

import click
from celery import Celery

from celery_sqs_backoff import redrive
from celery_sqs_backoff.redrive import RedriveReport
from celery_sqs_backoff.redrive.files import Journal
from celery_sqs_backoff.redrive.options import RedriveOptions
from celery_sqs_backoff.redrive.queues import Endpoint, Route
from celery_sqs_backoff.redrive.run import RedriveRun
from celery_sqs_backoff.sqs.arns import QueueArn
from celery_sqs_backoff.sqs.calls import Calls
from celery_sqs_backoff.testing import LocalQueue, create_local_queue, local_sqs_settings
from tests.support.fault_proxy import FaultProxy, fault_proxy
from tests.support.servers import ministack, sqs_client

if TYPE_CHECKING:
    from mypy_boto3_sqs.client import SQSClient

__all__ = ["main"]

LATENCY_MS = 20
OUTPUT = Path("demo-output", "bench-redrive.json")


def plain_loop(client: SQSClient, queue: LocalQueue) -> int:
    """Move all dead letters with a plain loop, and return their number."""
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
    """Move all messages, and print the figures. The benchmark calls this in a new process."""
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
    """Redrive a queue that needs no memory itself, and print how much memory the redrive needs.

    The benchmark calls this in a new process. A local server would need hours for 100,000 messages,
    because it looks through its whole queue at each receive.
    """
    report, _, _ = _move_endless(int(messages))
    print(json.dumps({"moved": report.sent, "peak_kib": _status("VmHWM")}))


def filtered(messages: str, every: str, latency: str) -> None:
    """Redrive only the messages of a rare task, and print the figures.

    One message in ``every`` messages has this task. The benchmark calls this in a new process.
    """
    report, queue, seconds = _move_endless(
        int(messages), every=int(every), latency=float(latency), task="shop.rare"
    )
    found = {"sent": report.sent, "ended": report.ended.value, "skipped": report.skipped}
    calls = sum(queue.calls.values()) / max(1, report.looked_at)
    print(json.dumps({**found, "calls_per_message": calls, "seconds": seconds}))


def _move_endless(
    messages: int, *, every: int = 1, latency: float = 0.0, on_event: Any = None, **options: Any
) -> tuple[RedriveReport, _Endless, float]:
    queue = _Endless(messages, every, latency)
    arn, client = QueueArn("aws", "us-east-1", "1", "endless-dlq"), lambda: cast("Any", queue)
    source = Endpoint(arn, Calls(client, "memory://endless-dlq"))
    main = Endpoint(arn.sibling("endless"), Calls(client, "memory://endless"))
    with TemporaryDirectory() as directory:
        journal = Journal(Path(directory, "journal"), source=str(arn))
        run = RedriveRun(
            Route(source, (main,)),
            RedriveOptions(**options),
            journal=journal,
            archive=None,
            on_event=on_event,
        )
        began = time.perf_counter()
        with journal:
            report = run()
    return report, queue, time.perf_counter() - began


class _Endless:
    """Stands for a boto3 client, and for the two queues of a redrive.

    The source makes a message when it is received, and delivers it again if it is not deleted in
    time. The destination accepts all messages and forgets them.
    """

    def __init__(self, messages: int, every: int, latency: float) -> None:
        self._numbers = iter(range(messages))
        self._every, self._latency = every, latency
        self._lock = threading.Lock()
        self._left = messages
        self._hidden: dict[str, tuple[float, int]] = {}
        self.calls: Counter[str] = Counter()

    def _called(self, name: str) -> None:
        with self._lock:
            self.calls[name] += 1
        if self._latency:
            time.sleep(self._latency)

    def get_queue_attributes(self, **_: Any) -> Any:
        self._called("GetQueueAttributes")
        return {"Attributes": {"ApproximateNumberOfMessages": str(self._left)}}

    def receive_message(
        self,
        *,
        MaxNumberOfMessages: int,  # noqa: N803
        VisibilityTimeout: int,  # noqa: N803
        **_: Any,
    ) -> Any:
        self._called("ReceiveMessage")
        now = time.monotonic()
        with self._lock:
            found = [(f"id-{n:032}", n) for n in islice(self._numbers, MaxNumberOfMessages)]
            if not found:
                again = [(i, n) for i, (until, n) in self._hidden.items() if until < now]
                found = again[:MaxNumberOfMessages]
            if self._every > 1:
                for id_, n in found:
                    self._hidden[id_] = (now + VisibilityTimeout, n)
        return {
            "Messages": [
                {"MessageId": id_, "ReceiptHandle": id_ + "h" * 200, "Body": self._body(n)}
                for id_, n in found
            ]
        }

    def _body(self, number: int) -> str:
        if self._every == 1:
            return f"{number}" + "x" * 300
        task = "shop.rare" if number % self._every == self._every - 1 else "shop.common"
        return json.dumps({"body": "x" * 300, "headers": {"task": task, "id": str(number)}})

    def delete_message_batch(self, *, Entries: Sequence[Any], **_: Any) -> Any:  # noqa: N803
        self._called("DeleteMessageBatch")
        with self._lock:
            self._left -= len(Entries)
            for entry in Entries:
                self._hidden.pop(entry["ReceiptHandle"][:35], None)
        return {"Successful": [{"Id": entry["Id"]} for entry in Entries]}

    def change_message_visibility_batch(
        self,
        *,
        Entries: Sequence[Any],  # noqa: N803
        **_: Any,
    ) -> Any:
        self._called("ChangeMessageVisibilityBatch")
        now = time.monotonic()
        with self._lock:
            for entry in Entries:
                id_ = entry["ReceiptHandle"][:35]
                if id_ in self._hidden:
                    number = self._hidden[id_][1]
                    self._hidden[id_] = (now + entry["VisibilityTimeout"], number)
        return {"Successful": [{"Id": entry["Id"]} for entry in Entries]}

    def send_message_batch(self, *, Entries: Sequence[Any], **_: Any) -> Any:  # noqa: N803
        self._called("SendMessageBatch")
        return {"Successful": [{"Id": e["Id"], "MessageId": "m"} for e in Entries]}


def run_child(*arguments: str) -> dict[str, Any]:
    """Run a function of this module in a new process, and return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.redrive", *arguments],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


class Bench:
    """An SQS server behind a proxy that counts calls and adds latency."""

    def __init__(self, client: SQSClient, proxy: FaultProxy) -> None:
        self._client = client
        self._proxy = proxy

    def run(self, kind: str, messages: int, *, rate: str = "") -> dict[str, Any]:
        """Fill a new dead-letter queue, let a child empty it, and return its figures and calls."""
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
        """Return when the server got each message, in seconds."""
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
@click.option("--rounds", default=3, show_default=True, help="Rounds of plain loop and redrive.")
@click.option("--messages", default=3_000, show_default=True, help="Messages in each round.")
@click.option(
    "--seconds", default=30, show_default=True, help="Time to measure each rate; 0 leaves it out."
)
@click.option(
    "--large",
    default=200_000,
    show_default=True,
    help="Messages to measure the memory with; 0 leaves it out.",
)
@click.option(
    "--filtered",
    "sieve",
    default=20_000,
    show_default=True,
    help="Messages to measure a filter with; 0 leaves it out.",
)
def main(rounds: int, messages: int, seconds: int, large: int, sieve: int) -> None:
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
        print(f"  calls        {spread(calls, 4)} per message, of {messages}; 0.30 is the least")
        found |= {"speeds": speeds, "ratio": ratio, "calls_per_message": calls}
        if seconds:
            found["rates"] = [rate_kept(bench, per_second, seconds) for per_second in (10, 50, 200)]
        if large:
            found["memory"] = {}
            for size in (1_000, large):
                done = run_child("memory", str(size))
                assert done["moved"] == size
                found["memory"][str(size)] = done["peak_kib"]
                print(f"  memory       {done['peak_kib'] / 1024:.1f} MiB at most, {size} messages")
    if sieve:
        done = found["filtered"] = run_child("filtered", str(sieve), "1000", "0.12")
        assert done["sent"] == sieve // 1000, done
        print(
            f"  filter       {done['sent']} of {sieve} messages found and sent in"
            f" {done['seconds']:.0f} s at 120 ms per call, with {done['calls_per_message']:.3f}"
            " calls per message looked at"
        )
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(json.dumps(found, indent=1))
    print(f"written to {OUTPUT}")


def rate_kept(bench: Bench, per_second: int, seconds: int) -> dict[str, float]:
    """Redrive at a rate. Return the rate that was kept, and the most messages in any second."""
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
    elif sys.argv[1:2] == ["filtered"]:
        filtered(*sys.argv[2:])
    else:
        main()
