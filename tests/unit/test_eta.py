"""A task that is not due: what SQS delays, and which receives were spent on waiting."""

from datetime import datetime, timezone

import pytest
from celery import Celery

from celery_sqs_backoff import SQSBackoffTask
from celery_sqs_backoff.sqs.delivery import Delivery
from celery_sqs_backoff.sqs.eta import deferrals, delay_seconds, parse_eta


@pytest.mark.parametrize(
    ("due_in", "asked"),
    [(-5, 0), (0, 0), (0.9, 0), (1.9, 1), (900, 900), (901, 900), (86_400, 900)],
)
def test_sqs_delays_whole_seconds_up_to_its_limit_and_never_too_long(due_in, asked):
    assert delay_seconds(due_in) == asked


@pytest.mark.parametrize(
    "header",
    ["1970-01-01T00:01:40", "1970-01-01T00:01:40Z", "1970-01-01T02:01:40+02:00"],
)
def test_an_eta_is_utc_unless_it_says_otherwise(header):
    assert parse_eta(header) == 100


@pytest.mark.parametrize("header", [None, "", "soon", 100, ["1970"]])
def test_what_is_no_eta_is_none(header):
    assert parse_eta(header) is None


@pytest.mark.parametrize(
    ("eta", "sent_at", "spent"),
    [
        (1000, None, 0),
        (900, 0, 0),
        (910, 0, 0),  # the worker waits for so little itself
        (1000, 0, 1),
        (44_000, 0, 1),
        (45_000, 0, 2),
        (7 * 86_400, 0, 14),
    ],
)
def test_receives_spent_on_waiting_are_counted_by_hops_of_twelve_hours(eta, sent_at, spent):
    assert deferrals(eta, sent_at=sent_at, held_seconds=15) == spent


@pytest.mark.parametrize(
    ("eta", "first_received_at", "spent"),
    [
        (60, 0, 1),  # a FIFO queue, or a sender that did not ask SQS for a delay: hidden at once
        (7_200, 900, 1),
        (7_200, 7_190, 0),  # the worker waits for so little itself
        (7_200, 7_300, 0),  # no worker was there before it was due
    ],
)
def test_receives_spent_on_waiting_begin_with_the_first_receive(eta, first_received_at, spent):
    """A run is not taken for a wait, nor a wait for a run, whoever sent the message."""
    message = {
        "MessageId": "m",
        "Attributes": {
            "SentTimestamp": "0",
            "ApproximateFirstReceiveTimestamp": str(first_received_at * 1000),
            "ApproximateReceiveCount": "3",
        },
    }
    delivery = Delivery.from_sqs(
        message, queue_url="q", received_at=8_000, eta=eta, held_seconds=15
    )
    assert delivery.earlier_runs == 2 - spent


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


def test_a_router_is_told_the_task_as_celery_tells_it(sent):
    """A router that asks it, as for ``delay()``, failed for each call with a countdown."""
    mail = a_task()
    type(mail).home = "mail.fifo"
    mail.app.conf.task_routes = (lambda *args, task=None, **kwargs: {"queue": task.home},)
    mail.apply_async(countdown=60)
    assert "DelaySeconds" not in sent[0]
