"""Tasks with an ETA or a countdown: how SQS delays them, and which receives come too early."""

from datetime import datetime, timezone

import pytest
from celery import Celery

from celery_sqs_backoff import SQSBackoffTask
from celery_sqs_backoff.sqs.delivery import Delivery, parse_eta


@pytest.mark.parametrize(
    "header",
    ["1970-01-01T00:01:40", "1970-01-01T00:01:40Z", "1970-01-01T02:01:40+02:00"],
)
def test_eta_in_utc(header):
    """An ETA without a time zone is in UTC."""
    assert parse_eta(header) == 100


@pytest.mark.parametrize("header", [None, "", "soon", 100, ["1970"]])
def test_invalid_eta(header):
    """An invalid ETA reads as None."""
    assert parse_eta(header) is None


@pytest.mark.parametrize(
    ("eta", "first_received_at", "spent"),
    [
        (900, None, 0),
        (910, None, 0),  # the worker holds a message that is due within 15 seconds
        (1_000, None, 1),  # SQS delayed it for 900 seconds at the most
        (44_000, None, 1),
        (45_000, None, 2),
        (7 * 86_400, None, 14),
        (60, 0, 1),  # SQS did not delay it: the queue is FIFO, or the sender did not ask
        (7_200, 900, 1),
        (7_200, 7_190, 0),  # the worker holds a message that is due within 15 seconds
        (7_200, 7_300, 0),  # no worker received it before it was due
    ],
)
def test_receives_spent_on_waiting(eta, first_received_at, spent):
    """The worker computes how many receives came before the ETA. These do not count as runs.

    SQS delays a message for up to 900 seconds after the send, and the worker hides it for up to 12
    hours after each receive.
    """
    attributes = {"SentTimestamp": "0", "ApproximateReceiveCount": "20"}
    if first_received_at is not None:
        attributes["ApproximateFirstReceiveTimestamp"] = str(first_received_at * 1000)
    message = {"MessageId": "m", "Attributes": attributes}
    delivery = Delivery.from_sqs(
        message, queue_url="q", received_at=8_000, eta=eta, held_seconds=15
    )
    assert delivery.earlier_runs == 19 - spent


@pytest.fixture
def sent(monkeypatch):
    """Collect the options with which tasks are published."""
    options = []
    monkeypatch.setattr(
        "celery.app.task.Task.apply_async", lambda self, *a, **o: options.append(o) or o
    )
    return options


def a_task(broker="sqs://"):
    app = Celery("eta", broker=broker, set_as_current=False)

    @app.task(base=SQSBackoffTask, lazy=False, shared=False)
    def mail():
        """Send nothing."""

    return mail


@pytest.mark.parametrize(
    ("broker", "options", "own", "asked"),
    [
        ("sqs://", {"countdown": 60}, None, 60),
        ("sqs://", {"countdown": 1.9}, None, 1),  # rounded down, so that it is never late
        ("sqs://", {"countdown": 0.9}, None, None),
        ("sqs://", {"countdown": 901}, None, 900),
        ("sqs://", {"eta": datetime(2100, 1, 1, tzinfo=timezone.utc)}, None, 900),
        ("sqs://", {}, None, None),
        ("sqs://", {"countdown": 60, "queue": "mail.fifo"}, None, None),
        ("sqs://", {"countdown": 60}, "mail.fifo", None),  # the task's own queue is a FIFO queue
        ("memory://", {"countdown": 60}, None, None),
        ("redis://", {"countdown": 60}, None, None),
    ],
)
def test_sqs_delay_seconds(sent, broker, options, own, asked):
    """A task with a countdown or ETA asks SQS for a delay of up to 900 seconds.

    It does not ask on a FIFO queue, where kombu would warn, or if the broker is not SQS.
    """
    mail = a_task(broker)
    type(mail).queue = own
    mail.apply_async(**options)
    assert sent[0].get("DelaySeconds") == asked
    assert sent[0].get("countdown") == options.get("countdown")


def test_router_gets_task(sent):
    """If a task with a countdown is routed by a function, the function gets the task."""
    mail = a_task()
    type(mail).home = "mail.fifo"
    mail.app.conf.task_routes = (lambda *args, task=None, **kwargs: {"queue": task.home},)
    mail.apply_async(countdown=60)
    assert "DelaySeconds" not in sent[0]
