"""A retry hides the message for a delay and publishes no copy. So does ``self.retry()``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Celery, Task, signals

from celery_sqs_backoff import FullJitter, Schedule, SQSBackoffTask
from tests.support.processes import eventually
from tests.support.record import connect_in_worker, note
from tests.support.redis_database import redis_url

from .stage import REDIS, Stage, app_of_this_module

pytestmark = pytest.mark.redis

app = app_of_this_module()


class ProviderDown(Exception):
    pass


def task(name: str, **options: Any) -> Any:
    return app.task(
        name=name, base=SQSBackoffTask, bind=True, **{"retry_on": (ProviderDown,)} | options
    )


def note_run(task: Any, **more: Any) -> None:
    request = task.request
    note(
        task=task.name,
        message_id=request.properties["delivery_info"]["sqs_message"]["MessageId"],
        retries=request.retries,
        redelivered=request.delivery_info["redelivered"],
        root=request.root_id,
        **more,
    )


@task("flaky", backoff=Schedule([1, 2, 1]))
def flaky(self: Any, fails: int) -> str:
    note_run(self)
    if self.request.retries < fails:
        raise ProviderDown("down")
    return "sent"


@task("hopeless", backoff=Schedule([2]), max_retries=1)
def hopeless(self: Any) -> None:
    raise ProviderDown("still down")


@task("spread", backoff=FullJitter(base=600))
def spread(self: Any) -> None:
    raise ProviderDown("down")


@task("polls")
def polls(self: Any, job: int) -> None:
    note_run(self, job=job)
    if self.request.retries < 2:
        self.retry(countdown=1)


@task("same")
def same(self: Any, job: int, *, step: int) -> None:
    """Call ``self.retry`` with the arguments and the queue that the message already has."""
    note_run(self, job=job)
    if self.request.retries < 1:
        queue = self.request.delivery_info["routing_key"]
        self.retry(args=[job], kwargs={"step": step}, countdown=1, queue=queue)


@task("goes_on")
def goes_on(self: Any, page: int) -> None:
    note_run(self, page=page)
    if page < 3:
        self.retry(args=[page + 1], countdown=0)


@task("others_retry")
def others_retry(self: Any) -> None:
    """Retry as a library does that calls Celery's own ``retry``: publish a copy, and then raise."""
    note_run(self)
    if self.request.retries < 1:
        raise Task.retry(self, countdown=0, throw=False)


@connect_in_worker(signals.task_retry)
def note_retry(request: Any, reason: Any, **_: Any) -> None:
    note(signal="task_retry", id=request.id, reason=str(reason))


@connect_in_worker(signals.task_success)
def note_success(sender: Any, result: Any, **_: Any) -> None:
    note(signal="task_success", id=sender.request.id, result=result)


@connect_in_worker(signals.task_failure)
def note_failure(task_id: str, exception: BaseException, **_: Any) -> None:
    note(signal="task_failure", id=task_id, error=type(exception).__name__)


@contextmanager
def captured_events(broker: str) -> Iterator[list[dict[str, Any]]]:
    """Collect Celery's events in a list, as the monitor Flower does."""
    monitor = Celery("monitor", broker=broker, set_as_current=False)
    events: list[dict[str, Any]] = []
    with monitor.connection_for_read() as connection:
        receiver = monitor.events.Receiver(connection, handlers={"*": events.append})
        listening = threading.Event()
        receiver.on_consume_ready = lambda *_, **__: listening.set()
        thread = threading.Thread(target=receiver.capture, kwargs={"wakeup": False})
        thread.start()
        try:
            assert listening.wait(10)
            yield events
        finally:
            receiver.should_stop = True
            thread.join(10)


BY_HAND = ("by-hand", "replaced", "others")


class Retried:
    """Run tasks that retry on two workers, and collect the events of the worker ``watched``."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        options: dict[str, Any] = {
            # SQS cannot carry events, so the worker writes them to Redis. Flower reads them there.
            "watched": {
                "conf": {"broker_write_url": redis_url()},
                "options": ("--task-events",),
                "queues": [stage["watched"].name, stage["results"].name],
            },
            "plain": {"queues": [stage[queue].name for queue in (*BY_HAND, "spread")]},
        }
        with captured_events(redis_url()) as self.events, stage.workers(**options):
            self.flaky = stage.send("flaky", 3, queue="watched")
            self.hopeless = stage.send("hopeless", queue="results")
            eventually(lambda: self.hopeless.state == "RETRY", timeout=60, interval=0.01)
            self.exception_meanwhile = self.hopeless.result
            stage.send("polls", 7, queue="by-hand")
            stage.send("same", 7, kwargs={"step": 1}, queue="by-hand")
            self.goes_on = stage.send("goes_on", 1, queue="replaced")
            stage.send("others_retry", queue="others")
            for _ in range(40):
                stage.send("spread", queue="spread")
            eventually(lambda: len(stage.delays_asked("spread")) >= 40, timeout=60)
            stage.wait_until_settled("watched", "results", *BY_HAND)
            for result, last in ((self.flaky, "succeeded"), (self.hopeless, "failed")):
                eventually(
                    lambda task_id=result.id, last=last: (
                        self.seen_of(task_id)[-1:] == [f"task-{last}"]
                    ),
                    timeout=60,
                )

    def seen_of(self, task_id: str) -> list[str]:
        return [event["type"] for event in self.events if event.get("uuid") == task_id]


@pytest.fixture(scope="module")
def retried(make_scene):
    queues = {queue: {} for queue in ("watched", "results", "spread", *BY_HAND)}
    return Retried(make_scene(queues=queues, conf={"result_backend": REDIS}))


@pytest.mark.hazard("H2", "H12")
@pytest.mark.story("M1", "Q1")
def test_same_message(retried):
    """Workers receive the same message, after each delay of the policy, until its task succeeds."""
    runs = [run for run in retried.stage.runs("flaky") if run["root"] == retried.flaky.id]
    assert len({run["message_id"] for run in runs}) == 1
    assert [(run["retries"], run["redelivered"]) for run in runs] == [
        (0, False),
        (1, True),
        (2, True),
        (3, True),
    ]
    stage = retried.stage
    assert stage.delays_asked("watched") == [1, 2, 1]
    assert stage.asked("SendMessage", "watched") == stage.asked("SendMessageBatch", "watched") == []
    assert len(stage.asked("DeleteMessageBatch", "watched")) == 1
    assert stage.asked("DeleteMessage", "watched") == []
    assert stage.dead_letters("watched") == []


@pytest.mark.story("M1", "R1", "Q4")
def test_spread(retried):
    """Forty messages whose tasks fail together are hidden for different times."""
    asked = retried.stage.asked("ChangeMessageVisibilityBatch", "spread")
    # A message with a short delay may be received again. It then has another receipt handle.
    delayed = {entry["ReceiptHandle"] for entry in asked if entry["VisibilityTimeout"]}
    given_back = {entry["ReceiptHandle"] for entry in asked if not entry["VisibilityTimeout"]}
    assert not delayed & given_back, "the worker that stopped has made hidden messages visible"
    delays = retried.stage.delays_asked("spread")[:40]
    assert all(1 <= delay <= 600 for delay in delays)
    assert len(set(delays)) >= 20
    assert min(delays) < 200 < 400 < max(delays)
    assert sum(retried.stage.messages("spread")) == 40


def test_results(retried):
    """The result is RETRY while the message is hidden, then SUCCESS or FAILURE."""
    assert isinstance(retried.exception_meanwhile, Exception)
    assert retried.flaky.get(timeout=5) == "sent"
    with pytest.raises(Exception, match="still down"):
        retried.hopeless.get(timeout=5)
    assert retried.hopeless.state == "FAILURE"


def test_signals(retried):
    """Each retry sends ``task_retry``, and the last run ``task_success`` or ``task_failure``."""

    def sent(result):
        return [entry["signal"] for entry in retried.stage.record.entries(id=result.id)]

    assert sent(retried.flaky) == ["task_retry"] * 3 + ["task_success"]
    assert sent(retried.hopeless) == ["task_retry", "task_failure"]


def test_flower(retried):
    """Flower sees for each attempt that the task is received, started, and retried or ended."""
    attempt = ["task-received", "task-started"]
    again = [*attempt, "task-retried"]
    assert retried.seen_of(retried.flaky.id) == [*again * 3, *attempt, "task-succeeded"]
    assert retried.seen_of(retried.hopeless.id) == [*again, *attempt, "task-failed"]
    of_flaky = [event for event in retried.events if event.get("uuid") == retried.flaky.id]
    assert [e["retries"] for e in of_flaky if e["type"] == "task-received"] == [0, 1, 2, 3]
    assert all("ProviderDown" in e["exception"] for e in of_flaky if e["type"] == "task-retried")


@pytest.mark.story("M3")
def test_by_hand(retried):
    """``self.retry(countdown=...)`` hides the message and publishes no copy."""
    stage = retried.stage
    for name, runs in {"polls": 3, "same": 2}.items():
        assert [run["retries"] for run in stage.runs(name)] == list(range(runs))
        assert len({run["message_id"] for run in stage.runs(name)}) == 1
        assert {run["job"] for run in stage.runs(name)} == {7}
    assert stage.delays_asked("by-hand") == [1, 1, 1]
    assert stage.asked("SendMessage", "by-hand") == []
    assert len(stage.asked("DeleteMessageBatch", "by-hand")) == 2


def test_other_arguments(retried):
    """``self.retry(args=...)`` sends a new message with the same root ID, and deletes its own."""
    stage = retried.stage
    runs = stage.runs("goes_on")
    assert [(run["page"], run["retries"]) for run in runs] == [(1, 0), (2, 1), (3, 2)]
    assert len({run["message_id"] for run in runs}) == 3
    assert {run["root"] for run in runs} == {retried.goes_on.id}
    assert len(stage.asked("SendMessage", "replaced")) == 2
    assert len(stage.asked("DeleteMessageBatch", "replaced")) == 3
    assert stage.delays_asked("replaced") == []


@pytest.mark.hazard("H1")
@pytest.mark.story("M3")
def test_others_retry(retried):
    """If a library's retry has published a copy of the message, the worker deletes the original."""
    stage = retried.stage
    assert [run["retries"] for run in stage.runs("others_retry")] == [0, 1]
    assert len(stage.asked("SendMessage", "others")) == 1
    assert len(stage.asked("DeleteMessageBatch", "others")) == 2
    assert stage.delays_asked("others") == []
