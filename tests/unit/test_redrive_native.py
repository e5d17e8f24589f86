"""When SQS itself can do it, and what becomes of its task."""

import threading
from types import SimpleNamespace

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from celery_sqs_backoff.queues import Queue
from celery_sqs_backoff.redrive import native
from celery_sqs_backoff.redrive.broker import Depth
from celery_sqs_backoff.redrive.errors import RedriveRefused, RedriveUnreachable
from celery_sqs_backoff.redrive.report import Ended
from celery_sqs_backoff.redrive.settings import Settings


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"task": "x"}, "selection"),
        ({"limit": 5}, "limit"),
        ({"rate": "10/s", "ramp": "1m"}, "ramp"),
        ({"spread": "1m"}, "spread"),
        ({"journal": "j"}, "journal"),
        ({"dump": "d"}, "dump"),
        ({"canary": 1}, "canary"),
        ({"probe": lambda: True}, "probe"),
        ({"expired": "drop"}, "expired"),
        ({"rate": "501/s"}, "500"),
        ({"rate": "30/m"}, "whole number"),
    ],
)
def test_the_tool_says_why_native_cannot_serve(options, word):
    assert word in native.why_not(Settings(**options), is_fifo=False)


def test_fifo_is_refused_for_its_deduplication_window():
    assert "five minutes" in native.why_not(Settings(), is_fifo=True)


@pytest.mark.parametrize("options", [{}, {"rate": "500/s"}, {"rate": "60/m"}])
def test_moving_everything_at_a_rate_can_be_native(options):
    assert native.why_not(Settings(**options), is_fifo=False) is None


def client_error(status, code, text):
    return ClientError(
        {
            "Error": {"Code": code, "Message": text},
            "ResponseMetadata": {"HTTPStatusCode": status},
        },
        "MessageMoveTask",
    )


class Sqs:
    """Answers as SQS does: a task that moves four of ten messages per look."""

    def __init__(self, end="COMPLETED", refusal=None, unanswered=0, cancel_refusal=None):
        self.unanswered, self.cancel_refusal = unanswered, cancel_refusal
        self.calls, self.end, self.refusal = [], end, refusal
        self.moved, self.state = 0, "RUNNING"

    def start_message_move_task(self, **request):
        self.calls.append(request)
        if self.refusal:
            raise client_error(*self.refusal)
        return {"TaskHandle": "handle"}

    def list_message_move_tasks(self, **request):
        if self.unanswered:
            self.unanswered -= 1
            raise EndpointConnectionError(endpoint_url="http://sqs")
        self.moved = min(10, self.moved + 4)
        if self.moved == 10:
            self.state = self.end
        answer = {"Status": self.state, "ApproximateNumberOfMessagesMoved": self.moved}
        if self.state == "FAILED":
            answer["FailureReason"] = "AWS.SimpleQueueService.NonExistentQueue"
        return {"Results": [answer]}

    def cancel_message_move_task(self, **request):
        self.calls.append(request)
        if self.cancel_refusal:
            raise client_error(*self.cancel_refusal)
        self.state = "CANCELLED"


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(native, "_POLL_SECONDS", 0.001)

    def run(sqs, *, stop=None, on_event=None, **options):
        source = SimpleNamespace(
            client=sqs, name="dlq", is_fifo=False, depth=lambda: Depth(10 - sqs.moved, 0, 0)
        )
        route = SimpleNamespace(
            source=source, queue=Queue("u", arn="arn:dlq"), fixed=False, default=None
        )
        monkeypatch.setattr(native, "find_route", lambda *a, **k: route)
        return native.move(
            None, "dlq", to=None, settings=Settings(**options), on_event=on_event, stop=stop
        )

    return run


def test_a_move_is_followed_to_its_end(run):
    sqs, events = Sqs(), []
    report = run(sqs, rate="60/m", on_event=events.append)
    assert sqs.calls == [{"SourceArn": "arn:dlq", "MaxNumberOfMessagesPerSecond": 1}]
    assert (report.sent, report.remaining, report.ended) == (10, 0, Ended.DONE)
    assert [type(event).__name__ for event in events] == [
        "Started", *["Progress"] * 3, "Finished"
    ]  # fmt: skip


def test_a_stop_cancels_the_move(run):
    sqs, stop = Sqs(), threading.Event()
    stop.set()
    report = run(sqs, stop=stop)
    assert sqs.calls[-1] == {"TaskHandle": "handle"}
    assert report.ended is Ended.INTERRUPTED
    assert report.sent == 4


def test_a_failed_move_says_sqs_reason(run):
    report = run(Sqs(end="FAILED"))
    assert report.ended is Ended.UNREACHABLE
    assert "NonExistentQueue" in report.detail


def test_a_move_that_is_over_before_it_can_be_cancelled_is_done(run):
    stop = threading.Event()
    stop.set()
    report = run(Sqs(cancel_refusal=(400, "ResourceNotFoundException", "no such task")), stop=stop)
    assert (report.sent, report.ended) == (10, Ended.DONE)


def test_a_cancel_that_is_denied_says_that_the_move_goes_on(run):
    stop = threading.Event()
    stop.set()
    with pytest.raises(RedriveUnreachable, match="goes on in SQS"):
        run(Sqs(cancel_refusal=(403, "AccessDenied", "no")), stop=stop)


def test_a_look_that_is_not_answered_is_repeated(run):
    assert run(Sqs(unanswered=3)).sent == 10


def test_an_sqs_that_stays_away_is_unreachable_and_the_move_goes_on(run, monkeypatch):
    monkeypatch.setattr(native, "_UNANSWERED_SECONDS", 0.0)
    with pytest.raises(RedriveUnreachable, match="goes on in SQS"):
        run(Sqs(unanswered=10**9))


@pytest.mark.parametrize(
    ("refusal", "word"),
    [
        ((400, "InvalidParameterValue", "There is already a task running"), "already a task"),
        ((400, "InvalidAction", "no"), "does not know StartMessageMoveTask"),
        ((500, "InternalFailure", "moto's answer"), "does not know StartMessageMoveTask"),
    ],
)
def test_a_refusal_says_why_and_what_to_do(run, refusal, word):
    with pytest.raises(RedriveRefused, match=word):
        run(Sqs(refusal=refusal))
