"""A task that is not due: what SQS delays, and which receives were spent on waiting."""

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
        (910, None, 0),  # the worker waits for so little itself
        (1_000, None, 1),  # SQS has delayed it for 900 seconds, as far as is known
        (44_000, None, 1),
        (45_000, None, 2),
        (7 * 86_400, None, 14),
        (60, 0, 1),  # a FIFO queue, or a sender that did not ask SQS for a delay: hidden at once
        (7_200, 900, 1),
        (7_200, 7_190, 0),  # the worker waits for so little itself
        (7_200, 7_300, 0),  # no worker was there before it was due
    ],
)
def test_receives_spent_on_waiting(eta, first_received_at, spent):
    """A run is not taken for a wait, nor a wait for a run, whoever sent the message."""
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
    """What tasks hand to Celery for publishing."""
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
        ("sqs://", {"countdown": 1.9}, None, 1),  # never too long
        ("sqs://", {"countdown": 0.9}, None, None),
        ("sqs://", {"countdown": 901}, None, 900),
        ("sqs://", {"eta": datetime(2100, 1, 1, tzinfo=timezone.utc)}, None, 900),
        ("sqs://", {}, None, None),
        ("sqs://", {"countdown": 60, "queue": "mail.fifo"}, None, None),
        ("sqs://", {"countdown": 60}, "mail.fifo", None),  # kombu would warn at each call
        ("memory://", {"countdown": 60}, None, None),
        ("redis://", {"countdown": 60}, None, None),
    ],
)
def test_sqs_delay_seconds(sent, broker, options, own, asked):
    """SQS delays as far as it can, but on no FIFO queue, and other brokers do not."""
    mail = a_task(broker)
    type(mail).queue = own
    mail.apply_async(**options)
    assert sent[0].get("DelaySeconds") == asked
    assert sent[0].get("countdown") == options.get("countdown")


def test_router_gets_task(sent):
    """A router gets the task as Celery passes it.

    A router that uses the task, as it can with ``delay()``, failed for each call with a countdown.
    """
    mail = a_task()
    type(mail).home = "mail.fifo"
    mail.app.conf.task_routes = (lambda *args, task=None, **kwargs: {"queue": task.home},)
    mail.apply_async(countdown=60)
    assert "DelaySeconds" not in sent[0]
