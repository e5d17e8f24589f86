"""What a pool process hands over to the worker's main process. It is pickled on the way."""

import pickle

import pytest
from celery.app.task import Context

from celery_sqs_backoff import Outcome
from celery_sqs_backoff.retry.budget import GiveUpReason
from celery_sqs_backoff.retry.decision import DeadLetter, End, Hide, RunEnd
from celery_sqs_backoff.sqs.delivery import Delivery
from celery_sqs_backoff.sqs.redact import ErrorText
from celery_sqs_backoff.task.handover import (
    RUNNING,
    BackoffRetry,
    Report,
    Run,
    pack,
    read_end,
    report_of,
    run_of,
)

DELIVERY = Delivery(message_id="m", queue_url="https://sqs.example/1/q", received_at=1.0)


class Unpicklable(Exception):
    def __reduce__(self):
        raise TypeError("no pickle")


@pytest.mark.hazard("H6")
def test_pickled_retry():
    """The exception that asks for a retry keeps its delay and its cause when it is pickled."""
    retry = pickle.loads(pickle.dumps(BackoffRetry(exc=OSError("down"), when=7)))
    assert type(retry) is BackoffRetry
    assert retry.when == 7
    assert "down" in str(retry.exc)


@pytest.mark.hazard("H6")
def test_retry_with_unpicklable_cause():
    """The exception that asks for a retry can be pickled even if its cause cannot."""
    retry = pickle.loads(pickle.dumps(BackoffRetry(exc=Unpicklable("down"), when=7)))
    assert retry.when == 7


def test_pickled_delivery():
    """A ``Delivery``, the facts about a received message, is equal to itself after pickling."""
    assert pickle.loads(pickle.dumps(DELIVERY)) == DELIVERY


def test_report_with_failure():
    """The report of a failed run is packed into Celery's failure and pickled with it."""
    exc = OSError("down")
    error = ErrorText(exception_type="builtins.OSError", exception_message="down")
    report = Report(
        RunEnd(End.RAISED, DeadLetter(GiveUpReason.RETRY_FOR, Outcome.RETRYABLE)), error
    )
    einfo = pack(exc, report, traceback="", internal=False)
    assert report_of(pickle.loads(pickle.dumps(einfo))) == report


@pytest.mark.parametrize("exc_info", [object(), type("Forged", (), {"sqs_report": "done"})()])
def test_failure_outside_task(exc_info):
    """``report_of`` returns None for a failure into which our task has packed no report."""
    assert report_of(exc_info) is None


@pytest.fixture
def run():
    run = Run("task-id", DELIVERY)
    token = RUNNING.set(run)
    yield run
    RUNNING.reset(token)


@pytest.mark.parametrize(
    ("facts", "is_own"),
    [
        ({"id": "task-id"}, True),
        ({"id": "another"}, False),
        ({"id": "task-id", "called_directly": True}, False),
        ({"id": "task-id", "is_eager": True}, False),
    ],
    ids=["own", "other id", "called", "eager"],
)
def test_run_of_request(run, facts, is_own):
    """If a task calls another one directly or eagerly, the other one is no part of the run."""
    found = run_of(Context(**{"called_directly": False, **facts}))
    assert found is (run if is_own else None)


@pytest.mark.parametrize("is_named", [False, True])
def test_named_delay(is_named):
    """The end of a run says whether the task itself has chosen the delay of its retry."""
    ended = read_end(BackoffRetry(when=7), is_named=is_named)
    assert ended == RunEnd(End.RETRY_ASKED, Hide(7, is_named=is_named))
