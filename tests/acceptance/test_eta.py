"""A task that is not due yet waits on SQS, runs once, and only if it is still wanted then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest
from celery.worker import state

from celery_sqs_backoff import SQSBackoffTask
from celery_sqs_backoff.testing import on_local_sqs
from tests.support.fault_proxy import fault_proxy
from tests.support.processes import eventually
from tests.support.record import note

from .stage import REDIS, Stage, app_of_this_module, stage

if TYPE_CHECKING:
    from mypy_boto3_sqs.client import SQSClient

pytestmark = pytest.mark.redis

app = app_of_this_module()

VISIBILITY_TIMEOUT_SECONDS = 3

#: The classic: longer than the visibility timeout. Stock Celery runs such a task three times.
ETA_SECONDS = 8


@app.task(base=SQSBackoffTask, name="eta.mail")
def mail(name: str) -> None:
    note(task="eta.mail", name=name, time=time.time())


@app.task(base=SQSBackoffTask, name="eta.revoke")
def revoke(task_id: str) -> None:
    """In a pool that shares the worker's process: what remote control does, where there is any."""
    state.revoked.add(task_id)
    note(task="eta.revoke")


class Afternoon:
    """All kinds of tasks with a time, sent at once to one worker."""

    def __init__(self, stage: Stage) -> None:
        assert stage.proxy is not None
        self.stage = stage
        main, fifo, far = stage.queues
        # Ready first: on a busy machine a worker takes longer to start than some of these wait.
        with stage.worker(pool="threads", concurrency=2, queues=[main.name, fifo.name]) as worker:
            self.sent_at = time.time()
            with on_local_sqs(app, stage.proxy.endpoint, *stage.queues):
                mail.apply_async(("countdown",), countdown=ETA_SECONDS, queue=main.name)
                mail.apply_async(("an hour",), countdown=3600, queue=far.name)
                mail.apply_async(("fifo",), countdown=2, queue=fifo.name)
                #: In the order of sending; 0: the message was sent without a delay.
                self.delays_published = [
                    e.get("DelaySeconds", 0) for e in stage.asked("SendMessage")
                ]
            # By name, as a producer does that does not know of our task class: no DelaySeconds.
            now = datetime.now(timezone.utc)
            send = stage.send
            send("eta.mail", "eta", eta=now + timedelta(seconds=ETA_SECONDS))
            self.far_eta = send("eta.mail", "far", eta=now + timedelta(hours=2))
            send("eta.mail", "late", eta=now - timedelta(minutes=5))
            self.expired = send(
                "eta.mail",
                "expired",
                eta=now + timedelta(hours=3),
                expires=now - timedelta(seconds=1),
            )
            revoked_id = "11111111-2222-4333-8444-555555555555"
            send("eta.revoke", revoked_id)
            eventually(lambda: stage.runs("eta.revoke"), timeout=20)
            self.revoked = send(
                "eta.mail", "revoked", eta=now + timedelta(hours=3), task_id=revoked_id
            )
            eventually(lambda: len(self.runs_of("eta", "countdown")) >= 2, timeout=30)
            eventually(lambda: self.revoked.state == self.expired.state == "REVOKED")
            eventually(lambda: stage.messages(main) == (0, 1), message="more than the far one")
            self.asked_to_hide = [
                entry["VisibilityTimeout"]
                for request in stage.proxy.requests("ChangeMessageVisibilityBatch")
                for entry in request["Entries"]
                if request["QueueUrl"] == main.url
            ]
            self.log = worker.log()

    def runs_of(self, *names: str) -> list[dict[str, Any]]:
        return [run for run in self.stage.runs("eta.mail") if run["name"] in names]


@pytest.fixture(scope="module")
def afternoon(
    sqs: SQSClient, sqs_endpoint: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Afternoon]:
    short = {"visibility_timeout_seconds": VISIBILITY_TIMEOUT_SECONDS}
    with (
        fault_proxy(sqs_endpoint) as proxy,
        stage(
            module=__name__,
            sqs=sqs,
            endpoint=sqs_endpoint,
            directory=tmp_path_factory.mktemp("eta"),
            proxy=proxy,
            queues={"main": short, "fifo": {"fifo": True, **short}, "far": {}},
            conf={"result_backend": REDIS},
        ) as made,
    ):
        yield Afternoon(made)


@pytest.mark.hazard("H10")
def test_a_countdown_is_a_delay_of_sqs_as_far_as_that_goes(afternoon: Afternoon) -> None:
    """15 minutes at most, and none on a FIFO queue."""
    assert afternoon.delays_published == [ETA_SECONDS, 900, 0]


@pytest.mark.hazard("H10")
@pytest.mark.parametrize("name", ["eta", "countdown", "fifo"])
def test_a_task_due_after_the_visibility_timeout_runs_once_and_not_early(
    afternoon: Afternoon, name: str
) -> None:
    [run] = afternoon.runs_of(name)
    due = afternoon.sent_at + (2 if name == "fifo" else ETA_SECONDS)
    assert due <= run["time"] < due + 5


@pytest.mark.hazard("H10", "H11")
def test_a_task_that_is_not_due_is_given_back_to_sqs_until_it_is(afternoon: Afternoon) -> None:
    """Hidden for as long as is left, not held in the worker's memory and renewed."""
    hidden = sorted(afternoon.asked_to_hide)
    assert ETA_SECONDS - 6 <= hidden[0] <= ETA_SECONDS, "less what the worker took to receive it"
    assert 7200 - 30 <= hidden[-1] <= 7200
    assert afternoon.runs_of("far") == []


def test_a_task_that_is_late_runs_at_once(afternoon: Afternoon) -> None:
    [run] = afternoon.runs_of("late")
    [on_time] = afternoon.runs_of("eta")
    assert run["time"] < on_time["time"] - 2


@pytest.mark.hazard("H26", "H27")
@pytest.mark.parametrize("why", ["expired", "revoked"])
def test_a_task_that_is_not_wanted_any_more_is_not_kept_until_its_time(
    afternoon: Afternoon, why: str
) -> None:
    assert getattr(afternoon, why).state == "REVOKED"
    assert afternoon.runs_of(why) == []
