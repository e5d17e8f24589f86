"""How a message ends that is not retried: as a dead letter with its reason, and a FAILURE."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import chord, signals

from celery_sqs_backoff import (
    NonRetryable,
    Outcome,
    Retryable,
    Schedule,
    SQSBackoffTask,
    Verdict,
)
from celery_sqs_backoff.foreign import s3
from tests.support.fault_proxy import http_error
from tests.support.processes import eventually
from tests.support.record import connect_in_worker, note

from .bad_input import BAD, envelope
from .stage import KILLED, REDIS, DeadLetter, Stage, app_of_this_module

pytestmark = pytest.mark.redis

app = app_of_this_module()


class ProviderDown(Exception):
    pass


class ProviderSays(Exception):
    """As in many client libraries: it cannot be unpickled, its constructor takes more than args."""

    def __init__(self, status: int, *, response: object) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status
        self.response = response


def note_undo(task: Any, exc: BaseException, args: Any, kwargs: Any) -> None:
    note(undo=task.name, error=type(exc).__name__, args=list(args))


def status_classes(exc: BaseException) -> Outcome | Verdict | None:
    if isinstance(exc, ProviderSays):
        return {401: Outcome.NOT_PROCESSED, 503: Verdict(Outcome.RETRYABLE)}.get(exc.status)
    return None


def task(name: str, **options: Any) -> Any:
    return app.task(
        name=name,
        base=SQSBackoffTask,
        **{"on_not_processed": note_undo, "backoff": Schedule([1])} | options,
    )


@task("unknown")
def unknown(secret: str = "") -> None:
    note(task="unknown")
    raise ValueError("no rule knows this")


@task("non_retryable")
def non_retryable() -> None:
    raise NonRetryable("may have been sent")


@task("not_processed")
def not_processed() -> None:
    raise NonRetryable("refused at the door", not_processed=True)


@task("classified", classify=(status_classes,))
def classified(status: int) -> None:
    raise ProviderSays(status, response=object())


@task("max_retries", retry_on=(ProviderDown,), max_retries=2)
def max_retries() -> None:
    note(task="max_retries")
    raise ProviderDown("down")


@task("unpicklable", classify=(status_classes,), max_retries=1)
def unpicklable() -> None:
    raise ProviderSays(503, response=lambda: None)


@task("retry_for", retry_on=(ProviderDown,), retry_for=2)
def retry_for() -> None:
    raise ProviderDown("down for long")


@task("receives")
def receives() -> None:
    note(task="receives")
    raise Retryable("the queue's maxReceiveCount comes first")


@task("by_hand", bind=True, max_retries=1, retry_on=(ProviderDown,))
def by_hand(self: Any) -> None:
    try:
        raise ProviderDown("down")
    except ProviderDown as exc:
        raise self.retry(exc=exc, countdown=1) from exc


@task("fails", on_give_up="fail")
def fails() -> None:
    raise ValueError("no dead letter, please")


@task("works")
def works() -> int:
    return 1


@task("collects")
def collects(results: list[int]) -> int:
    return sum(results)


@task("errback")
def errback(request: Any, exc: BaseException, traceback: Any) -> None:
    note(errback=request.id, error=type(exc).__name__)


@task("scans", retry_on=(ProviderDown,), max_retries=1, bind=True)
def scans(self: Any, records: list[dict[str, Any]]) -> None:
    note(task="scans", key=records[0]["key"], id=self.request.id, n=self.request.retries)
    raise ProviderDown


from_s3 = s3("scans")


@task("check_address")
def check_address(address: str) -> None:
    raise ValueError(f"not an address: {address!r}; password=hunter2")


@connect_in_worker(signals.task_failure)
def note_failure(task_id: str, **_: Any) -> None:
    note(signal="task_failure", id=task_id)


#: Arguments; the exception's class, the outcome, why there is no retry, runs (``None``: it depends
#: on the clock), undone or not (``None``: see the test of its own).
CASES = {
    "unknown": ([], "ValueError", "UNKNOWN", "not retryable", 1, False),
    "non_retryable": ([], "NonRetryable", "UNKNOWN", "not retryable", 1, False),
    "not_processed": ([], "NonRetryable", "NOT_PROCESSED", "not retryable", 1, True),
    "classified": ([401], "ProviderSays", "NOT_PROCESSED", "not retryable", 1, True),
    "max_retries": ([], "ProviderDown", "RETRYABLE", "max_retries reached", 3, True),
    "unpicklable": ([], "ProviderSays", "RETRYABLE", "max_retries reached", 2, True),
    "retry_for": ([], "ProviderDown", "RETRYABLE", "retry_for is over", None, True),
    "by_hand": ([], "ProviderDown", "RETRYABLE", "max_retries reached", 2, None),
}


S3_EVENT = json.dumps(
    {
        "Records": [
            {
                "eventSource": "aws:s3",
                "eventName": "ObjectCreated:Put",
                "awsRegion": "eu-west-1",
                "eventTime": "2026-01-01T00:00:00.000Z",
                "s3": {
                    "bucket": {"name": "uploads", "arn": "arn:aws:s3:::uploads"},
                    "object": {"key": "red+flower%C3%A9.jpg", "size": 1024, "eTag": "d41d8cd9"},
                },
            }
        ]
    }
)
S3_TEST_EVENT = json.dumps({"Service": "Amazon S3", "Event": "s3:TestEvent", "Bucket": "uploads"})

#: 150,000 characters on which the patterns that mask credentials searched for minutes.
HOSTILE_PIECES = ("a-", "x-amz-", "token://")
HOSTILE_CPU_SECONDS = 5.0

#: A task that no worker has, with a forged log line in its name.
HUGE_NAME = "x" * 150 + "\n[ERROR] all mails are lost " + "y" * 60_000


class GivenUp:
    """What one worker has left of all tasks and messages of this module."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.started_at = time.time()
        conf = {"sqs_backoff": {"foreign": {stage["s3"].name: f"{__name__}.from_s3"}}}
        main = stage["main"].name
        with stage.worker(concurrency=4, conf=conf, **KILLED) as worker:
            self.results = {
                name: stage.send(
                    name, *case[0], link_error=stage.app.signature("errback", queue=main)
                )
                for name, case in CASES.items()
            }
            self.failing = stage.send("fails")
            self.received = stage.send("receives", queue="twice")
            self.undeliverable = stage.send("unknown", queue="no-dlq")
            header = [stage.app.signature(name, queue=main) for name in ("works", "unknown")]
            body = stage.app.signature("collects", queue=main)
            self.chord = chord(header, app=stage.app)(body)
            [self.s3_id, _] = stage.send_bodies(S3_EVENT, S3_TEST_EVENT, queue="s3")
            stage.send_bodies(BAD["unknown-task"], queue="not-yet")
            stage.send(HUGE_NAME, queue="not-yet")
            stage.wait_until_settled("main", "twice", "no-dlq", "s3")
            eventually(lambda: self.chord.ready(), timeout=60)
            eventually(lambda: "sqs_backoff.finding: W002" in worker.log(), timeout=60)
            eventually(lambda: len(stage.delays_asked("not-yet")) >= 2, timeout=60)

            before = cpu_seconds(worker.pid)
            headers = {"task": "check_address", "id": "1", "argsrepr": "", "kwargsrepr": ""}
            for piece in HOSTILE_PIECES:
                arguments = json.dumps([[piece * (150_000 // len(piece))], {}, {}])
                stage.send_bodies(envelope(headers, arguments), queue="hostile")
            stage.wait_until_settled("hostile")
            self.hostile_cpu_seconds = cpu_seconds(worker.pid) - before
            self.log = worker.log()
        self.dead = {
            queue: {d.record["id"]: d for d in stage.dead_letters(queue) if d.record}
            for queue in ("main", "twice")
        }

    def letter(self, name: str) -> DeadLetter:
        return self.dead["main"][self.results[name].id]


def cpu_seconds(pid: int) -> float:
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def given_up(make_scene: Callable[..., Stage]) -> GivenUp:
    return GivenUp(
        make_scene(
            queues={
                "main": {},
                "twice": {"max_receive_count": 2},
                "no-dlq": {"dead_letter_queue": False},
                "s3": {},
                "not-yet": {"max_receive_count": 3},
                "hostile": {},
            },
            conf={"result_backend": REDIS},
        )
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.story("M4", "Q2")
def test_record(given_up: GivenUp, name: str) -> None:
    """The dead letter says why it is there, and when and where it failed."""
    _, error, outcome, reason, attempts, _ = CASES[name]
    record = given_up.letter(name).record
    assert record is not None
    assert (record["task"], record["outcome"], record["reason"]) == (name, outcome, reason)
    assert record["exception_type"].rpartition(".")[2] == error
    assert record["attempts"] == attempts or attempts is None
    assert record["origin"] == given_up.stage["main"].arn
    assert record["worker"].startswith("test-")
    assert given_up.started_at - 1 < record["first_received_at"] <= record["failed_at"] + 1
    assert record["failed_at"] < time.time() + 1
    assert error in record["traceback"]


@pytest.mark.parametrize("name", CASES)
def test_result(given_up: GivenUp, name: str) -> None:
    """The result is FAILURE, announced once, and the errback runs once."""
    result = given_up.results[name]
    assert result.state == "FAILURE"
    assert len(given_up.stage.record.entries(signal="task_failure", id=result.id)) == 1
    assert len(given_up.stage.record.entries(errback=result.id)) == 1


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[-1] is not None])
@pytest.mark.story("B1", "B2", "B3", "B4")
def test_undo(given_up: GivenUp, name: str) -> None:
    """``on_not_processed`` runs at each failure, unless it may have been processed."""
    args, error, _, _, attempts, is_undone = CASES[name]
    undone = given_up.stage.record.entries(undo=name)
    expected = 0 if not is_undone else attempts
    assert len(undone) == expected or (expected is None and undone)
    assert all((u["error"], u["args"]) == (error, args) for u in undone)


def test_undo_by_hand(given_up: GivenUp) -> None:
    """``on_not_processed`` runs when ``self.retry()`` finds no retry left."""
    assert given_up.stage.record.entries(undo="by_hand", error="ProviderDown")


def test_replayable(given_up: GivenUp) -> None:
    """The dead letter is the message as it was sent: replayed, it runs again."""
    letter = given_up.letter("classified")
    envelope = json.loads(base64.b64decode(letter.body))
    assert envelope["headers"]["task"] == "classified"
    assert envelope["headers"]["id"] == given_up.results["classified"].id
    assert envelope["headers"]["retries"] == 0


def test_unpicklable(given_up: GivenUp) -> None:
    """The text of an exception that cannot be unpickled is kept."""
    record = given_up.letter("unpicklable").record
    assert record is not None
    assert record["exception_message"] == "HTTP 503"


@pytest.mark.hazard("H20")
def test_max_receive_count(given_up: GivenUp) -> None:
    """One receive before SQS would move it without a reason, the message is given up."""
    record = given_up.dead["twice"][given_up.received.id].record
    assert record is not None
    assert record["reason"] == "the queue's maxReceiveCount is reached"
    assert record["outcome"] == "RETRYABLE"
    assert record["attempts"] == 2
    assert given_up.received.state == "FAILURE"
    assert len(given_up.stage.runs("receives")) == 2


def test_on_give_up_fail(given_up: GivenUp) -> None:
    """``on_give_up="fail"`` makes no dead letter."""
    assert given_up.failing.state == "FAILURE"
    assert given_up.failing.id not in given_up.dead["main"]


def test_no_dead_letter_queue(given_up: GivenUp) -> None:
    """A queue without a dead-letter queue is named once, at the start."""
    assert given_up.undeliverable.state == "FAILURE"
    said = [line for line in given_up.log.splitlines() if "sqs_backoff.finding: W002" in line]
    assert len(said) == 1
    assert given_up.stage["no-dlq"].name in said[0]


@pytest.mark.hazard("H20", "H25")
def test_chord(given_up: GivenUp) -> None:
    """A chord ends when a part of it is given up."""
    assert given_up.chord.state == "FAILURE"
    assert "unknown" in str(given_up.chord.result) or "ValueError" in str(given_up.chord.result)


def test_s3_notification(given_up: GivenUp) -> None:
    """A message that Celery has not sent becomes a task, is retried, and keeps its body."""
    [letter] = given_up.stage.dead_letters("s3")
    assert letter.body == S3_EVENT
    runs = given_up.stage.runs("scans")
    assert [(run["id"], run["n"]) for run in runs] == [(given_up.s3_id, n) for n in (0, 1)]
    assert {run["key"] for run in runs} == {"red flower\u00e9.jpg"}
    assert "sqs_backoff.ignored" in given_up.log, "the test event of S3"


def test_bad_input_waits(given_up: GivenUp) -> None:
    """Before its last receive a message that is no task is hidden for other workers."""
    delays = given_up.stage.delays_asked("not-yet")
    assert all(1 <= delay <= 8 for delay in delays)
    assert given_up.stage.asked("DeleteMessageBatch", "not-yet") == []
    assert given_up.stage.dead_letters("not-yet") == []


def test_hostile_argument(given_up: GivenUp) -> None:
    """An argument made to be slow to mask does not stop the worker, and is masked."""
    assert given_up.hostile_cpu_seconds < HOSTILE_CPU_SECONDS
    letters = given_up.stage.dead_letters("hostile")
    assert len(letters) == len(HOSTILE_PIECES)
    for record in [letter.record or {} for letter in letters]:
        assert record["exception_message"].startswith("not an address: '")
        assert len(record["exception_message"]) < 1_010
        assert record["traceback"].endswith("password=***\n")
        assert "hunter2" not in str(record)


def test_huge_name(given_up: GivenUp) -> None:
    """A task name of 60,000 characters neither floods the log nor forges a line of it."""
    assert "sqs_backoff.not_understood" in given_up.log
    assert "y" * 200 not in given_up.log
    assert not [line for line in given_up.log.splitlines() if line.startswith("[ERROR]")]


# Permissions that the worker lacks


@task("denied.succeeds")
def denied_succeeds() -> None:
    note(task="denied.succeeds")


@task("denied.fails")
def denied_fails(queue: str) -> None:
    note(task="denied.fails", queue=queue)
    raise ValueError


@task("denied.retries", retry_on=(ProviderDown,))
def denied_retries() -> None:
    note(task="denied.retries")
    raise ProviderDown


def refusal(status: int, code: str, *actions: str) -> Any:
    return http_error(status, code, sender_fault=True, actions=actions)


class Denied:
    """A worker that lacks another permission on each of its queues."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        denied = "AccessDenied"
        gone = "AWS.SimpleQueueService.NonExistentQueue"
        letters = {queue: stage[queue].dlq for queue in ("no-letters", "gone")}
        stage.fail("no-attributes", refusal(403, denied, "GetQueueAttributes"))
        hiding = ("ChangeMessageVisibility", "ChangeMessageVisibilityBatch")
        stage.fail("no-hiding", refusal(403, denied, *hiding))
        stage.fail(letters["no-letters"], refusal(403, denied, "SendMessageBatch"))
        stage.fail(letters["gone"], refusal(400, gone, "SendMessageBatch"))
        with stage.worker(concurrency=1, **KILLED) as worker:
            for _ in range(3):
                stage.send("denied.succeeds", queue="no-attributes")
                stage.send("denied.fails", "no-letters", queue="no-letters")
            stage.send("denied.fails", "gone", queue="gone")
            for _ in range(2):
                stage.send("denied.retries", queue="no-hiding")
            for dlq in letters.values():
                eventually(
                    lambda dlq=dlq: len(stage.asked("SendMessageBatch", dlq)) >= 4, timeout=60
                )
            self.held = {queue: stage.messages(queue) for queue in letters}
            self.sent_meanwhile = {queue: stage.dead_letters(queue) for queue in letters}
            eventually(lambda: len(stage.runs("denied.retries")) >= 4, timeout=60)
            stage.heal(letters["no-letters"])
            stage.wait_until_settled("no-attributes", "no-letters")
            self.log = worker.log()

    def said(self, text: str, queue: str) -> int:
        name = self.stage[queue].name
        return sum(text in line and name in line for line in self.log.splitlines())


@pytest.fixture(scope="module")
def denied(make_scene: Callable[..., Stage]) -> Denied:
    queues: dict[str, Any] = {queue: {} for queue in ("no-attributes", "no-letters", "gone")}
    return Denied(make_scene(queues=queues | {"no-hiding": {"visibility_timeout_seconds": 2}}))


def test_no_attributes(denied: Denied) -> None:
    """A worker that may not read a queue's attributes works, and says so once."""
    assert len(denied.stage.runs("denied.succeeds")) == 3
    assert denied.said("needs sqs:GetQueueAttributes", "no-attributes") == 1
    assert "Traceback (most recent call last):\n  File" not in denied.log.partition("ValueError")[0]


@pytest.mark.parametrize("queue", ["no-letters", "gone"])
def test_no_dead_letters(denied: Denied, queue: str) -> None:
    """Dead letters that cannot be sent are held on their queue, do not run again, and are named."""
    messages = 3 if queue == "no-letters" else 1
    assert denied.said("SQS refuses to send dead letters", queue) == 1
    assert denied.held[queue] == (0, messages)
    assert denied.sent_meanwhile[queue] == []
    assert len(denied.stage.record.entries(task="denied.fails", queue=queue)) == messages


def test_dead_letters_allowed_again(denied: Denied) -> None:
    """Once the permission is there, held dead letters are sent, once each."""
    assert len(denied.stage.dead_letters("no-letters")) == 3


@pytest.mark.hazard("H5")
def test_no_hiding(denied: Denied) -> None:
    """Backoffs that may not be set leave the delay to the queue, and are named once."""
    assert len(denied.stage.runs("denied.retries")) >= 4
    assert denied.said("SQS refuses to hide messages", "no-hiding") == 1
