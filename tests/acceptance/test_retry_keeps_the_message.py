"""A failure that is RETRYABLE hides the message for a drawn delay, and publishes nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Celery, signals

from celery_sqs_backoff import FullJitter, Schedule, SQSBackoffTask
from tests.support.processes import eventually
from tests.support.record import connect_in_worker, note

from .stage import REDIS, Stage, app_of_this_module

app = app_of_this_module()


class ProviderDown(Exception):
    pass


@app.task(
    base=SQSBackoffTask,
    bind=True,
    name="flaky",
    retry_on=(ProviderDown,),
    backoff=Schedule([1, 2, 1]),
)
def flaky(self: Any, fails: int) -> str:
    request = self.request
    note(
        task="flaky",
        message_id=request.properties["delivery_info"]["sqs_message"]["MessageId"],
        retries=request.retries,
        redelivered=request.delivery_info["redelivered"],
    )
    if request.retries < fails:
        raise ProviderDown("down")
    return "sent"


@app.task(
    base=SQSBackoffTask, name="spread", retry_on=(ProviderDown,), backoff=FullJitter(base=600)
)
def spread() -> None:
    raise ProviderDown("down")


@app.task(
    base=SQSBackoffTask,
    bind=True,
    name="hopeless",
    retry_on=(ProviderDown,),
    backoff=Schedule([1]),
    max_retries=1,
)
def hopeless(self: Any) -> None:
    raise ProviderDown("still down")


@connect_in_worker(signals.task_retry)
def note_retry(request: Any, reason: Any, **_: Any) -> None:
    note(signal="task_retry", id=request.id, reason=str(reason))


@connect_in_worker(signals.task_success)
def note_success(sender: Any, result: Any, **_: Any) -> None:
    note(signal="task_success", id=sender.request.id, result=result)


@connect_in_worker(signals.task_failure)
def note_failure(task_id: str, exception: BaseException, **_: Any) -> None:
    note(signal="task_failure", id=task_id, error=type(exception).__name__)


@pytest.mark.hazard("H2", "H12")
def test_the_same_message_is_received_until_the_task_succeeds(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage()
    with stage.worker():
        task_id = stage.send("flaky", 3).id
        stage.wait_until_settled()
    runs = stage.runs("flaky")
    assert len({run["message_id"] for run in runs}) == 1
    assert [(run["retries"], run["redelivered"]) for run in runs] == [
        (0, False),
        (1, True),
        (2, True),
        (3, True),
    ]
    assert stage.delays_asked() == [1, 2, 1]
    assert stage.proxy.counts()["SendMessage"].calls == 0
    assert stage.proxy.counts()["SendMessageBatch"].calls == 0
    assert len(stage.asked("DeleteMessageBatch")) == 1
    assert stage.proxy.counts()["DeleteMessage"].calls == 0
    signalled = [entry["signal"] for entry in stage.record.entries(id=task_id)]
    assert signalled == ["task_retry"] * 3 + ["task_success"]
    assert stage.dead_letters() == []


def test_the_delays_are_spread_over_what_the_policy_allows(
    make_stage: Callable[..., Stage],
) -> None:
    """Forty messages fail together: they must not come back together."""
    stage = make_stage()
    with stage.worker():
        for _ in range(40):
            stage.send("spread")
        eventually(lambda: len(stage.delays_asked()) >= 40, timeout=30)
    # One that has come back by then, under another receipt handle, is given back.
    asked = stage.asked("ChangeMessageVisibilityBatch")
    delayed = {entry["ReceiptHandle"] for entry in asked if entry["VisibilityTimeout"]}
    given_back = {entry["ReceiptHandle"] for entry in asked if not entry["VisibilityTimeout"]}
    assert not delayed & given_back, "a worker that stops must leave the delays alone"
    delays = stage.delays_asked()[:40]
    assert all(1 <= delay <= 600 for delay in delays)
    assert len(set(delays)) >= 20
    assert min(delays) < 200 < 400 < max(delays)
    assert sum(stage.messages()) == 40


@pytest.mark.redis
def test_the_result_is_retry_while_the_message_is_hidden_then_success(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage(conf={"result_backend": REDIS})
    with stage.worker():
        result = stage.send("flaky", 2)
        eventually(lambda: result.state == "RETRY", timeout=30, interval=0.01)
        assert isinstance(result.result, Exception)
        assert result.get(timeout=30) == "sent"
        hopeless = stage.send("hopeless")
        eventually(lambda: hopeless.state == "RETRY", timeout=30, interval=0.01)
        with pytest.raises(Exception, match="still down"):
            hopeless.get(timeout=30)
        assert hopeless.state == "FAILURE"
        stage.wait_until_settled()
    assert [e["signal"] for e in stage.record.entries(id=hopeless.id)] == [
        "task_retry",
        "task_failure",
    ]


@contextmanager
def captured_events(broker: str) -> Iterator[list[dict[str, Any]]]:
    """Listen as Flower does."""
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


@pytest.mark.redis
def test_flower_sees_each_attempt(make_stage: Callable[..., Stage], redis_vhost: str) -> None:
    """SQS carries no events: the worker's *write* broker does, and Flower reads from there."""
    stage = make_stage()

    def seen_of(task_id: str) -> list[str]:
        return [event["type"] for event in events if event.get("uuid") == task_id]

    with (
        captured_events(redis_vhost) as events,
        stage.worker(conf={"broker_write_url": redis_vhost}, options=("--task-events",)),
    ):
        flaky_id, hopeless_id = stage.send("flaky", 1).id, stage.send("hopeless").id
        eventually(lambda: seen_of(flaky_id)[-1:] == ["task-succeeded"], timeout=30)
        eventually(lambda: seen_of(hopeless_id)[-1:] == ["task-failed"], timeout=30)
    retried = ["task-received", "task-started", "task-retried"]
    assert seen_of(flaky_id) == [*retried, "task-received", "task-started", "task-succeeded"]
    assert seen_of(hopeless_id) == [*retried, "task-received", "task-started", "task-failed"]
    of_flaky = [event for event in events if event.get("uuid") == flaky_id]
    assert [e["retries"] for e in of_flaky if e["type"] == "task-received"] == [0, 1]
    [retry] = [event for event in of_flaky if event["type"] == "task-retried"]
    assert "ProviderDown" in retry["exception"]
