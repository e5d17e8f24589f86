"""When SQS itself can do it, and what becomes of its task."""

import threading
from types import SimpleNamespace

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from celery_sqs_backoff.redrive import native
from celery_sqs_backoff.redrive.errors import RedriveRefused, RedriveUnreachable
from celery_sqs_backoff.redrive.queues import Depth
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
        ({"expired": "extend"}, "expired"),
        ({"rate": "501/s"}, "500"),
        ({"rate": "30/m"}, "whole number"),
        ({"max_replays": 1}, "max_replays"),
        ({"in_doubt": "hold"}, "in_doubt"),
        ({"threads": 4}, "threads"),
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


#: A task that SQS still lists.
YESTERDAY = {
    "Status": "COMPLETED",
    "ApproximateNumberOfMessagesMoved": 777,
    "StartedTimestamp": 1,
}


class Sqs:
    """Answers as SQS does: a task that moves four of ten messages per look."""

    def __init__(
        self, end="COMPLETED", refusal=None, unanswered=0, cancel_refusal=None, unlisted=0
    ):
        self.unlisted, self.looks = unlisted, 0
        self.unanswered, self.cancel_refusal = unanswered, cancel_refusal
        self.calls, self.end, self.refusal = [], end, refusal
        self.moved, self.state = 0, "RUNNING"
        self.started = False

    def start_message_move_task(self, **request):
        self.calls.append(request)
        if self.refusal:
            raise client_error(*self.refusal)
        self.started = True
        return {"TaskHandle": "handle"}

    def list_message_move_tasks(self, **request):
        if not self.started:
            return {"Results": [YESTERDAY]}
        self.looks += 1
        if self.looks <= self.unlisted:
            return {"Results": [YESTERDAY]}
        if self.unanswered:
            self.unanswered -= 1
            raise EndpointConnectionError(endpoint_url="http://sqs")
        self.moved = min(10, self.moved + 4)
        if self.moved == 10:
            self.state = self.end
        answer = {"Status": self.state, "ApproximateNumberOfMessagesMoved": self.moved}
        if self.state == "FAILED":
            answer["FailureReason"] = "AWS.SimpleQueueService.NonExistentQueue"
        if self.state == "RUNNING":
            answer["TaskHandle"] = "handle"
        return {"Results": [{**answer, "StartedTimestamp": 2}, YESTERDAY]}

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
            client=sqs,
            name="dlq",
            is_fifo=False,
            arn="arn:dlq",
            depth=lambda: Depth(10 - sqs.moved, 0, 0),
        )
        return native.move(source, None, Settings(**options), on_event=on_event, stop=stop)

    return run


def test_a_move_is_followed_to_its_end(run):
    sqs, events = Sqs(), []
    report = run(sqs, rate="60/m", on_event=events.append)
    assert sqs.calls == [{"SourceArn": "arn:dlq", "MaxNumberOfMessagesPerSecond": 1}]
    assert (report.sent, report.remaining, report.ended) == (10, 0, Ended.DONE)
    assert [type(event).__name__ for event in events] == [
        "Started", *["Progress"] * 3, "Audit", "Finished"
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
    events = []
    with pytest.raises(RedriveUnreachable, match="goes on in SQS"):
        run(Sqs(unanswered=10**9), on_event=events.append)
    assert [type(event).__name__ for event in events] == ["Started", "Audit", "Finished"]
    assert events[-1].ended == "unreachable"


@pytest.mark.parametrize(
    ("refusal", "word"),
    [
        ((400, "InvalidParameterValue", "There is already a task running"), "already a task"),
        ((400, "InvalidAction", "no"), "does not have StartMessageMoveTask"),
    ],
)
def test_a_refusal_says_why_and_what_to_do(run, refusal, word):
    with pytest.raises(RedriveRefused, match=word):
        run(Sqs(refusal=refusal))


def test_an_error_inside_sqs_is_not_taken_for_a_server_without_the_call(run):
    with pytest.raises(RedriveUnreachable, match="not known whether the move has begun"):
        run(Sqs(refusal=(500, "InternalFailure", "no")))


def test_a_move_that_may_have_begun_is_audited(run):
    """SQS may move the whole queue, and nobody would know who has asked for it."""
    events = []
    with pytest.raises(RedriveUnreachable):
        run(Sqs(refusal=(500, "InternalFailure", "no")), on_event=events.append)
    assert [type(event).__name__ for event in events] == ["Audit", "Finished"]
    assert events[-1].ended == "unreachable"


def test_a_move_is_audited_whatever_its_first_event_raises(run):
    """Nobody reads the other end of the pipe; SQS moves the queue all the same."""
    events = []

    def closed(event):
        events.append(event)
        if len(events) == 1:
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run(Sqs(), on_event=closed)
    assert [type(event).__name__ for event in events] == ["Started", "Audit", "Finished"]
    assert "goes on in SQS" in events[-1].detail


def test_the_progress_of_an_earlier_task_is_not_ours(run):
    """SQS lists the last ten tasks of the queue, and a new one not at once."""
    assert run(Sqs(unlisted=2)).sent == 10
