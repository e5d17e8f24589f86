"""A message that is not retried becomes a dead letter with a reason, and its result is FAILURE."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import pytest
from celery import chord, signals

from celery_sqs_backoff import (
    Outcome,
    Retryable,
    Schedule,
    SQSBackoffTask,
    Verdict,
)
from celery_sqs_backoff.foreign import s3
from tests.support.processes import eventually
from tests.support.record import connect_in_worker, note

from .stage import KILLED, REDIS, DeadLetter, Stage, app_of_this_module

pytestmark = pytest.mark.redis

app = app_of_this_module()


class ProviderDown(Exception):
    pass


class ProviderSays(Exception):
    """An error that cannot be unpickled, because its constructor needs more than ``args``.

    Many client libraries have such errors.
    """

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


@connect_in_worker(signals.task_failure)
def note_failure(task_id: str, **_: Any) -> None:
    note(signal="task_failure", id=task_id)


#: By task: its arguments, the class of its exception, the outcome, the reason for the dead letter,
#: how often the task runs, and whether ``on_not_processed`` is called after each run. None in the
#: last column means that a test of its own checks this.
CASES = {
    "unknown": ([], "ValueError", "UNKNOWN", "not retryable", 1, False),
    "classified": ([401], "ProviderSays", "NOT_PROCESSED", "not retryable", 1, True),
    "max_retries": ([], "ProviderDown", "RETRYABLE", "max_retries reached", 3, True),
    "unpicklable": ([], "ProviderSays", "RETRYABLE", "max_retries reached", 2, True),
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

#: The name of a task that no worker knows. It contains a forged log line.
HUGE_NAME = "x" * 150 + "\n[ERROR] all mails are lost " + "y" * 60_000


class GivenUp:
    """Run all tasks of this module on one worker, and keep their results and dead letters."""

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
            self.received = stage.send("receives", queue="twice")
            header = [stage.app.signature(name, queue=main) for name in ("works", "unknown")]
            body = stage.app.signature("collects", queue=main)
            self.chord = chord(header, app=stage.app)(body)
            [self.s3_id, _] = stage.send_bodies(S3_EVENT, S3_TEST_EVENT, queue="s3")
            stage.send(HUGE_NAME, queue="not-yet")
            stage.wait_until_settled("main", "twice", "s3")
            eventually(lambda: self.chord.ready(), timeout=60)
            eventually(lambda: len(stage.delays_asked("not-yet")) >= 2, timeout=60)
            self.log = worker.log()
        self.dead = {
            queue: {d.record["id"]: d for d in stage.dead_letters(queue) if d.record}
            for queue in ("main", "twice")
        }

    def letter(self, name: str) -> DeadLetter:
        return self.dead["main"][self.results[name].id]


@pytest.fixture(scope="module")
def given_up(make_scene):
    return GivenUp(
        make_scene(
            queues={
                "main": {},
                "twice": {"max_receive_count": 2},
                "s3": {},
                "not-yet": {"max_receive_count": 3},
            },
            conf={"result_backend": REDIS},
        )
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.story("M4", "Q2")
def test_record(given_up, name):
    """The dead letter says why the worker gave it up, and when and where its task failed."""
    _, error, outcome, reason, attempts, _ = CASES[name]
    record = given_up.letter(name).record
    assert record is not None
    assert (record["task"], record["outcome"], record["reason"]) == (name, outcome, reason)
    assert record["exception_type"].rpartition(".")[2] == error
    assert record["attempts"] == attempts
    assert record["origin"] == given_up.stage["main"].arn
    assert record["worker"].startswith("test-")
    assert given_up.started_at - 1 < record["first_received_at"] <= record["failed_at"] + 1
    assert record["failed_at"] < time.time() + 1
    assert error in record["traceback"]
    assert name != "unpicklable" or record["exception_message"] == "HTTP 503"


@pytest.mark.parametrize("name", CASES)
def test_result(given_up, name):
    """The result is FAILURE, ``task_failure`` is sent once, and the errback runs once."""
    result = given_up.results[name]
    assert result.state == "FAILURE"
    assert len(given_up.stage.record.entries(signal="task_failure", id=result.id)) == 1
    assert len(given_up.stage.record.entries(errback=result.id)) == 1


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[-1] is not None])
@pytest.mark.story("B1", "B2", "B3", "B4")
def test_undo(given_up, name):
    """``on_not_processed`` runs after each failed run, unless the run may have done its work."""
    args, error, _, _, attempts, is_undone = CASES[name]
    undone = given_up.stage.record.entries(undo=name)
    assert len(undone) == (attempts if is_undone else 0)
    assert all((u["error"], u["args"]) == (error, args) for u in undone)


def test_undo_by_hand(given_up):
    """``on_not_processed`` runs when ``self.retry()`` finds no retry left."""
    assert given_up.stage.record.entries(undo="by_hand", error="ProviderDown")


def test_replayable(given_up):
    """A dead letter has the body of the message as it was sent, so it can be replayed."""
    letter = given_up.letter("classified")
    envelope = json.loads(base64.b64decode(letter.body))
    assert envelope["headers"]["task"] == "classified"
    assert envelope["headers"]["id"] == given_up.results["classified"].id
    assert envelope["headers"]["retries"] == 0


@pytest.mark.hazard("H20")
def test_max_receive_count(given_up):
    """The worker gives a message up at ``maxReceiveCount``, with a reason. SQS would give none."""
    record = given_up.dead["twice"][given_up.received.id].record
    assert record is not None
    assert record["reason"] == "the queue's maxReceiveCount is reached"
    assert record["outcome"] == "RETRYABLE"
    assert record["attempts"] == 2
    assert given_up.received.state == "FAILURE"
    assert len(given_up.stage.runs("receives")) == 2


@pytest.mark.hazard("H20", "H25")
def test_chord(given_up):
    """A chord fails, and does not wait for ever, when one of its tasks is given up."""
    assert given_up.chord.state == "FAILURE"
    assert "unknown" in str(given_up.chord.result) or "ValueError" in str(given_up.chord.result)


def test_s3_notification(given_up):
    """A notification of S3 runs as a task, is retried, and is unchanged as a dead letter."""
    [letter] = given_up.stage.dead_letters("s3")
    assert letter.body == S3_EVENT
    runs = given_up.stage.runs("scans")
    assert [(run["id"], run["n"]) for run in runs] == [(given_up.s3_id, n) for n in (0, 1)]
    assert {run["key"] for run in runs} == {"red flower\u00e9.jpg"}
    assert "sqs_backoff.ignored" in given_up.log, "the worker ignores the test event of S3"


def test_huge_name(given_up):
    """A task name of 60,000 characters neither floods the log nor forges a line of it."""
    assert "sqs_backoff.not_understood" in given_up.log
    assert "y" * 200 not in given_up.log
    assert not [line for line in given_up.log.splitlines() if line.startswith("[ERROR]")]
