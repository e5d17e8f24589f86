"""What is not retried goes to the dead-letter queue with its reason; its result is FAILURE."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from celery import chord, signals
from celery.exceptions import Ignore, Reject

from celery_sqs_backoff import (
    NonRetryable,
    Outcome,
    Retryable,
    Schedule,
    SQSBackoffTask,
    Verdict,
)
from tests.support.processes import eventually
from tests.support.record import connect_in_worker, note

from .stage import REDIS, DeadLetter, Stage, app_of_this_module, stage

if TYPE_CHECKING:
    from mypy_boto3_sqs.client import SQSClient

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


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def note_undo(task: Any, exc: BaseException, args: Any, kwargs: Any) -> None:
    note(undo=task.name, error=type(exc).__name__, args=list(args))


def status_classes(exc: BaseException) -> Outcome | Verdict | None:
    if isinstance(exc, ProviderSays):
        return {401: Outcome.NOT_PROCESSED, 503: Verdict(Outcome.RETRYABLE)}.get(exc.status)
    return None


def task(name: str, **options: Any) -> Any:
    return app.task(
        name=name, base=SQSBackoffTask, **{"undo": note_undo, "backoff": Schedule([1])} | options
    )


@task("unknown")
def unknown(secret: str = "") -> None:
    note(task="unknown")
    raise ValueError("nobody has classified this; password=hunter2")


@task("non_retryable")
def non_retryable() -> None:
    raise NonRetryable("may have been sent")


@task("safe_to_undo")
def safe_to_undo() -> None:
    raise NonRetryable("refused at the door", safe_to_undo=True)


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


@task("unprintable")
def unprintable() -> None:
    raise Unprintable


@task("rejects")
def rejects() -> None:
    raise Reject("not for us", requeue=False)


@task("ignores")
def ignores() -> None:
    note(task="ignores")
    raise Ignore


@task("works")
def works() -> int:
    return 1


@task("collects")
def collects(results: list[int]) -> int:
    return sum(results)


@task("errback")
def errback(request: Any, exc: BaseException, traceback: Any) -> None:
    note(errback=request.id, error=type(exc).__name__)


@connect_in_worker(signals.task_failure)
def note_failure(task_id: str, **_: Any) -> None:
    note(signal="task_failure", id=task_id)


#: Arguments; the exception's class, the outcome, why there is no retry, runs (``None``: it depends
#: on the clock), undone or not (``None``: see the test of its own).
CASES = {
    "unknown": ([], "ValueError", "UNKNOWN", "not retryable", 1, False),
    "non_retryable": ([], "NonRetryable", "UNKNOWN", "not retryable", 1, False),
    "safe_to_undo": ([], "NonRetryable", "NOT_PROCESSED", "not retryable", 1, True),
    "classified": ([401], "ProviderSays", "NOT_PROCESSED", "not retryable", 1, True),
    "max_retries": ([], "ProviderDown", "RETRYABLE", "max_retries reached", 3, True),
    "unpicklable": ([], "ProviderSays", "RETRYABLE", "max_retries reached", 2, True),
    "retry_for": ([], "ProviderDown", "RETRYABLE", "retry_for is over", None, True),
    "by_hand": ([], "ProviderDown", "RETRYABLE", "max_retries reached", 2, None),
    "unprintable": ([], "Unprintable", "UNKNOWN", "not retryable", 1, False),
}


class Aftermath:
    """What was left when all tasks of this module had been given up by one worker."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.main, self.twice, self.no_dlq = stage.queues
        self.started_at = time.time()
        with stage.worker(concurrency=4) as worker:
            self.results = {
                name: stage.send(
                    name, *case[0], link_error=stage.app.signature("errback", queue=self.main.name)
                )
                for name, case in CASES.items()
            }
            self.failing = stage.send("fails")
            self.received = stage.send("receives", queue=self.twice)
            self.undeliverable = stage.send("unknown", queue=self.no_dlq)
            self.rejected = stage.send("rejects", queue=self.twice)
            self.ignored = stage.send("ignores")
            header = [stage.app.signature(n, queue=self.main.name) for n in ("works", "unknown")]
            body = stage.app.signature("collects", queue=self.main.name)
            self.chord = chord(header, app=stage.app)(body)
            stage.wait_until_settled()
            eventually(lambda: self.chord.ready(), timeout=30)
            eventually(lambda: "sqs_backoff.finding: W002" in worker.log(), timeout=30)
            self.log = worker.log()
        self.dead = {d.record["id"]: d for d in stage.dead_letters() if d.record}
        self.dead_of_twice = {d.record["id"]: d for d in stage.dead_letters(self.twice) if d.record}

    def letter(self, name: str) -> DeadLetter:
        return self.dead[self.results[name].id]


@pytest.fixture(scope="module")
def aftermath(
    sqs: SQSClient, sqs_endpoint: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Aftermath]:
    with stage(
        module=__name__,
        sqs=sqs,
        endpoint=sqs_endpoint,
        directory=tmp_path_factory.mktemp("give_up"),
        queues={
            "main": {},
            "twice": {"max_receive_count": 2},
            "no-dlq": {"dead_letter_queue": False},
        },
        conf={"result_backend": REDIS},
    ) as made:
        yield Aftermath(made)


@pytest.mark.parametrize("name", CASES)
def test_the_dead_letter_says_why_it_is_there(aftermath: Aftermath, name: str) -> None:
    _, error, outcome, reason, attempts, _ = CASES[name]
    record = aftermath.letter(name).record
    assert record is not None
    assert (record["task"], record["outcome"], record["reason"]) == (name, outcome, reason)
    assert record["exception_type"].rpartition(".")[2] == error
    assert record["attempts"] == attempts or attempts is None
    assert record["origin"] == aftermath.main.arn
    assert record["worker"].startswith("test-")
    assert aftermath.started_at - 1 < record["first_received_at"] <= record["failed_at"] + 1
    assert record["failed_at"] < time.time() + 1
    assert error in record["traceback"]


@pytest.mark.parametrize("name", CASES)
def test_the_result_is_failure_and_the_errback_runs_once(aftermath: Aftermath, name: str) -> None:
    result = aftermath.results[name]
    assert result.state == "FAILURE"
    assert len(aftermath.stage.record.entries(signal="task_failure", id=result.id)) == 1
    assert len(aftermath.stage.record.entries(errback=result.id)) == 1


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[-1] is not None])
def test_undo_runs_at_each_failure_unless_it_may_have_been_processed(
    aftermath: Aftermath, name: str
) -> None:
    args, error, _, _, attempts, is_undone = CASES[name]
    undone = aftermath.stage.record.entries(undo=name)
    expected = 0 if not is_undone else attempts
    assert len(undone) == expected or (expected is None and undone)
    assert all((u["error"], u["args"]) == (error, args) for u in undone)


def test_undo_runs_when_a_retry_by_hand_finds_none_left(aftermath: Aftermath) -> None:
    assert aftermath.stage.record.entries(undo="by_hand", error="ProviderDown")


def test_the_dead_letter_is_the_message_as_it_was_sent(aftermath: Aftermath) -> None:
    """Replayed, it runs again: body and headers are unchanged."""
    letter = aftermath.letter("classified")
    envelope = json.loads(base64.b64decode(letter.body))
    assert envelope["headers"]["task"] == "classified"
    assert envelope["headers"]["id"] == aftermath.results["classified"].id
    assert envelope["headers"]["retries"] == 0


def test_the_record_masks_what_looks_like_a_credential(aftermath: Aftermath) -> None:
    record = aftermath.letter("unknown").record
    assert record is not None
    assert "password=***" in record["exception_message"]
    assert "hunter2" not in json.dumps(record["exception_message"])


def test_the_unprintable_is_given_up_all_the_same(aftermath: Aftermath) -> None:
    record = aftermath.letter("unprintable").record
    assert record is not None
    assert "unprintable" in record["exception_message"]


def test_the_message_of_an_exception_that_cannot_be_unpickled_is_kept(
    aftermath: Aftermath,
) -> None:
    record = aftermath.letter("unpicklable").record
    assert record is not None
    assert record["exception_message"] == "HTTP 503"


@pytest.mark.hazard("H20")
def test_one_receive_before_sqs_would_move_it_the_message_is_given_up(
    aftermath: Aftermath,
) -> None:
    """SQS moves messages without a word: no reason, and a result that waits for ever."""
    record = aftermath.dead_of_twice[aftermath.received.id].record
    assert record is not None
    assert record["reason"] == "the queue's maxReceiveCount is reached"
    assert record["outcome"] == "RETRYABLE"
    assert record["attempts"] == 2
    assert aftermath.received.state == "FAILURE"
    assert len(aftermath.stage.runs("receives")) == 2


def test_a_rejected_message_is_a_dead_letter(aftermath: Aftermath) -> None:
    record = aftermath.dead_of_twice[aftermath.rejected.id].record
    assert record is not None
    assert record["reason"] == "rejected by the task"


def test_an_ignored_message_is_done(aftermath: Aftermath) -> None:
    assert len(aftermath.stage.runs("ignores")) == 1
    assert aftermath.ignored.id not in aftermath.dead


def test_on_give_up_fail_makes_no_dead_letter(aftermath: Aftermath) -> None:
    assert aftermath.failing.state == "FAILURE"
    assert aftermath.failing.id not in aftermath.dead


def test_a_queue_without_a_dead_letter_queue_is_named_once_at_start(aftermath: Aftermath) -> None:
    assert aftermath.undeliverable.state == "FAILURE"
    said = [line for line in aftermath.log.splitlines() if "sqs_backoff.finding: W002" in line]
    assert len(said) == 1
    assert aftermath.no_dlq.name in said[0]


@pytest.mark.hazard("H20", "H25")
def test_a_chord_ends_when_a_part_of_it_is_given_up(aftermath: Aftermath) -> None:
    assert aftermath.chord.state == "FAILURE"
    assert "unknown" in str(aftermath.chord.result) or "ValueError" in str(aftermath.chord.result)
