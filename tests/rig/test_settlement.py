"""When a worker calls SQS to renew leases and to settle messages, and which calls it makes."""

from __future__ import annotations

import math
from itertools import groupby

import pytest
from botocore.exceptions import EndpointConnectionError, ReadTimeoutError

from celery_sqs_backoff import Retryable, Schedule
from celery_sqs_backoff.sqs.dead_letter import ATTRIBUTE_NAME

from . import Rig, Run
from .bodies import raises, returns
from .sqs import URL

DELETE, HIDE, SEND = "DeleteMessageBatch", "ChangeMessageVisibilityBatch", "SendMessageBatch"
AWAY, NO_ANSWER = EndpointConnectionError(endpoint_url="x"), ReadTimeoutError(endpoint_url="x")
VOID = "ReceiptHandleIsInvalid"
DOWN, BAD = Retryable("down"), ValueError("bad")
HOUR = 3_600


def begin(rig, body=returns, count=1, *, args=(), **options):
    """Send messages and begin their tasks. Return the messages and the runs."""
    rig.task(body, **options)
    messages = [rig.send(args=args) for _ in range(count)]
    if not rig.workers:
        rig.start_worker(processes=count)
    return messages, [rig.begin() for _ in messages]


def end(rig, *args, **options):
    """Send messages and run their tasks to the end. Return the messages."""
    messages, runs = begin(rig, *args, **options)
    for run in runs:
        run.finish()
    return messages


def retried(rig, delay, count=1):
    """Run tasks that will be retried after a delay. Return their messages."""
    return end(rig, raises(DOWN), count, backoff=Schedule([delay]))


def given_up(rig, count=1):
    """Run tasks whose messages become dead letters. Return the messages."""
    return end(rig, raises(BAD), count)


def sizes(rig, action):
    """Return the number of entries of each call of an action."""
    return [len(call.arguments["Entries"]) for call in rig.calls(action)]


def asked(rig):
    """Return the seconds in each entry of the calls that change visibility."""
    return [
        entry["VisibilityTimeout"]
        for call in rig.calls(HIDE)
        for entry in call.arguments["Entries"]
    ]


def settling(rig):
    """Return the calls that delete messages or send dead letters, in order."""
    return [call.action for call in rig.calls() if call.action in (DELETE, SEND)]


def handles(rig, *actions):
    """Return the receipt handles of all entries, in order. Each receive gives a new handle."""
    return [
        entry["ReceiptHandle"]
        for call in rig.calls()
        if call.action in actions
        for entry in call.arguments["Entries"]
    ]


def letters(rig):
    """Return the messages of the dead-letter queue."""
    return rig.sqs.queues[URL + "q-dlq"].messages


# Batches


@pytest.mark.parametrize(
    ("count", "calls"),
    [(1, [(1, 0.1)]), (10, [(10, 0)]), (25, [(10, 0), (10, 0), (5, 0.1)])],
)
def test_batches(rig, count, calls):
    """The worker deletes ten messages at once. A smaller batch waits 0.1 s for more messages."""
    messages, runs = begin(rig, count=count)
    began = rig.timeline.now
    for run in runs:
        run.finish()
    rig.pass_time(1)
    found = [(len(call.arguments["Entries"]), call.at - began) for call in rig.calls(DELETE)]
    assert found == [(size, pytest.approx(after, abs=0.001)) for size, after in calls]
    queue = rig.sqs.queues[URL + "q"]
    ids = [queue.message_of(handle).id for handle in handles(rig, DELETE)]
    by_task = {message.task_id: message.message_id for message in messages}
    assert ids == [by_task[run.task_id] for run in runs]


@pytest.mark.parametrize(
    ("timeout", "fault", "seconds"), [("60", None, 60), ("0", None, 30), ("60", AWAY, 30)]
)
def test_receive_timeout(rig, timeout, fault, seconds):
    """A receive sets a visibility timeout. It is 30 s if the queue's is 0 or cannot be read."""
    rig.queue(VisibilityTimeout=timeout)
    rig.task(returns)
    if fault:
        rig.fault("GetQueueAttributes", fault, seconds=60)
    rig.send()
    rig.begin()
    assert rig.calls("ReceiveMessage")[-1].arguments["VisibilityTimeout"] == seconds


# Renewals


def renewal_times(rig, seconds):
    """Return when visibility was changed in the next seconds, and for how long."""
    began = rig.timeline.now
    rig.pass_time(seconds)
    return [
        (round(change.at - began, 1), change.seconds)
        for change in rig.sqs.changes
        if change.at >= began
    ]


@pytest.mark.hazard("H17")
@pytest.mark.parametrize(
    ("timeout", "times"), [("30", [(10, 30), (20, 30)]), ("3", [(1, 10), (4.3, 10), (7.7, 10)])]
)
def test_renewal_times(rig, timeout, times):
    """A worker renews a lease when a third of its time is over, for at least 10 s."""
    rig.queue(VisibilityTimeout=timeout)
    begin(rig)
    assert renewal_times(rig, 29 if timeout == "30" else 10) == times


def test_renewal_batches(rig):
    """A worker renews ten leases with one call."""
    begin(rig, count=23)
    rig.pass_time(11)
    assert sizes(rig, HIDE) == [10, 10, 3]


@pytest.mark.hazard("H16")
@pytest.mark.parametrize("ends", [Run.finish, Run.exceed_time_limit])
def test_settled_once(rig, ends):
    """A worker hides a message only once, even if the pool reports the end of the run twice.

    It does not renew the lease afterwards.
    """
    [_], [run] = begin(rig, raises(DOWN), backoff=Schedule([600]))
    ends(run)
    rig.pass_time(590)
    assert asked(rig) == [600]


@pytest.mark.hazard("H16")
def test_backoff_during_renewal(rig):
    """A worker waits for the end of a renewal before it hides the message.

    Otherwise SQS could carry out the renewal last, and the message would come back too early.
    """
    [_], [run] = begin(rig, raises(DOWN), backoff=Schedule([600]))
    rig.latency = 2.0
    rig.pass_time(10.5)
    run.finish()
    rig.pass_time(5)
    first, second = rig.sqs.changes
    assert (first.seconds, second.seconds) == (30, 599)
    assert second.at - first.at == pytest.approx(2, abs=0.2)


@pytest.mark.parametrize(
    ("error", "entries"),
    [
        ("InternalError", None),
        ("InternalError", [0]),
        ("ExpiredToken", None),
        (RuntimeError("expired"), None),
    ],
    ids=repr,
)
def test_renewal_fails_in_passing(rig, error, entries):
    """A worker soon repeats a failed renewal, whatever the error is, and loses no message."""
    messages, _ = begin(rig, count=5)
    rig.fault(HIDE, error, entries=entries, seconds=15)
    rig.pass_time(18)
    assert len(rig.sqs.changes) >= 5
    rig.pass_time(60)
    assert {(message.fate, message.receives) for message in messages} == {("held", 1)}
    assert rig.story() == []


@pytest.mark.hazard("H17")
def test_twelve_hours(rig):
    """A worker renews a lease up to SQS's limit of 12 hours, and then tells the run of the loss.

    The run goes on in this worker only. When it ends, the worker deletes the message.
    """
    [message], [run] = begin(rig)
    rig.pass_time(43_000)
    assert rig.story() == []
    rig.pass_time(13 * HOUR - 43_000)
    assert rig.story() == ["lost"]
    assert len(rig.told("HeldTooLong")) == 1
    assert rig.sqs.refusals == []
    assert rig.worker.runs == [run]
    run.finish()
    rig.pass_time(1)
    assert (message.fate, rig.story()[1:]) == ("deleted", ["ran: succeeded"])


def test_denied_renewals(rig):
    """If AWS denies renewals, the worker makes few calls."""
    begin(rig, count=40)
    rig.fault(HIDE, "AccessDenied", seconds=math.inf)
    rig.fault("ReceiveMessage", "AccessDenied", seconds=math.inf)
    rig.pass_time(600)
    assert 5 < len(rig.calls(HIDE)) < 30


# Settlements that fail


def test_failed_entries(rig):
    """A worker repeats only those entries of a batch that have failed."""
    end(rig, count=3)
    rig.fault(DELETE, "InternalError", entries=[1])
    rig.pass_time(20)
    assert sizes(rig, DELETE) == [3, 1]
    _, second, _, again = handles(rig, DELETE)
    assert again == second
    assert rig.told("Settled")[0].failed == 1


def test_long_outage(rig):
    """In an outage, a worker repeats a delete at a moderate pace until SQS accepts it.

    The message does not run again.
    """
    [message] = end(rig)
    rig.fault(DELETE, AWAY, seconds=1_000)
    rig.pass_time(60)
    assert 5 < len(rig.calls(DELETE)) < 60
    rig.pass_time(1_000)
    assert (message.fate, message.receives) == ("deleted", 1)


@pytest.mark.parametrize("seed", range(5))
def test_end_of_outage(seed):
    """At most 3 s after an outage, the worker has made the deletes that failed during it."""
    with Rig(seed=seed) as rig:
        messages, runs = begin(rig, count=2)
        rig.fault("*", AWAY, seconds=29)
        runs[0].finish()
        rig.pass_time(29)
        runs[1].finish()
        rig.pass_time(3)
        assert [message.fate for message in messages] == ["deleted", "deleted"]


@pytest.mark.parametrize("code", [VOID, "InvalidParameterValue"])
def test_void_handle(rig, code):
    """A worker does not repeat a delete if SQS refuses the receipt handle.

    It deletes the message when the message comes back.
    """
    [message] = end(rig)
    rig.fault(DELETE, code, entries=[0], seconds=25)
    rig.pass_time(29)
    assert sizes(rig, DELETE) == [1]
    [failed] = rig.told("SettlementFailed")
    assert (failed.action, failed.code) == ("delete", code)
    rig.pass_time(2)
    assert (message.fate, message.receives, len(rig.told("RunEnded"))) == ("deleted", 2, 1)


def test_backoff_held_up(rig):
    """If a call that hides a message fails, the next try asks for the rest of the delay.

    It asks for at least a second.
    """
    retried(rig, 3)
    rig.fault(HIDE, "InternalError", entries=[0], seconds=6)
    rig.pass_time(10)
    seconds = [length for length, _ in groupby(asked(rig))]
    assert seconds in ([3, 2, 1], [3, 1])
    assert [change.seconds for change in rig.sqs.changes] == [1]


def test_backoff_too_late(rig):
    """A worker no longer tries to hide a message that may already be visible again.

    Another worker may have received it by then.
    """
    retried(rig, 600)
    rig.fault(HIDE, "InternalError", entries=[0], seconds=math.inf)
    rig.fault("ReceiveMessage", AWAY, seconds=math.inf)
    rig.pass_time(31)
    tries = len(rig.calls(HIDE))
    rig.pass_time(300)
    assert len(rig.calls(HIDE)) == tries > 2
    [failed] = rig.told("SettlementFailed")
    assert (failed.action, failed.code) == ("hide", None)


#: How a call fails, and whether SQS may have carried it out.
HOW_IT_FAILS = [
    pytest.param({"error": NO_ANSWER, "answer_lost": True}, True, id="answer lost"),
    pytest.param({"error": AWAY}, False, id="refused"),
    pytest.param({"error": "InternalError", "entries": [0]}, False, id="listed as failed"),
]


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
@pytest.mark.parametrize(("how", "may_be_done"), HOW_IT_FAILS)
def test_giving_back_fails(rig, how, may_be_done):
    """A worker repeats a failed call that gives a message back only if SQS has not carried it out.

    Otherwise another worker may already have the message.
    """
    rig.task(returns)
    rig.send(), rig.send()
    rig.begin()
    rig.fault("ReceiveMessage", AWAY, seconds=15)
    rig.fault(HIDE, **how)
    rig.worker.lose_connection()
    rig.pass_time(9)
    assert asked(rig) == ([0] if may_be_done else [0, 0])


@pytest.mark.parametrize(("how", "may_be_done"), HOW_IT_FAILS)
def test_short_backoff_fails(rig, how, may_be_done):
    """A worker does not repeat a call that hides a message if that delay may already be over.

    Another worker may have received the message after the delay.
    """
    retried(rig, 1)
    rig.fault("ReceiveMessage", AWAY, seconds=15)
    rig.fault(HIDE, **how, seconds=2)
    ended = rig.timeline.now
    rig.pass_time(9)
    is_late = rig.calls(HIDE)[-1].at > ended + 2
    assert is_late is not may_be_done


def test_backoff_without_answer(rig):
    """If the response to a call that hides a message is lost, the worker repeats the call."""
    [message] = retried(rig, 20)
    rig.fault(HIDE, NO_ANSWER, answer_lost=True, seconds=5)
    rig.pass_time(9)
    assert asked(rig)[0] == 20
    assert 13 <= asked(rig)[-1] <= 15
    assert (message.fate, message.receives) == ("hidden", 1)


def test_denied_delete(rig, caplog):
    """If AWS denies deletes, the worker logs this once for the queue, and repeats them seldom."""
    messages = end(rig, count=25)
    rig.fault(DELETE, "AccessDenied", seconds=1_200)
    rig.pass_time(1_200)
    assert len([r for r in caplog.records if "AccessDenied" in r.getMessage()]) == 1
    assert 5 < len(rig.calls(DELETE)) < 100
    rig.pass_time(61)
    assert {(message.fate, message.receives) for message in messages} == {("deleted", 1)}


@pytest.mark.parametrize(("body", "fate"), [(returns, "deleted"), (raises(DOWN), "hidden")])
def test_foreign_error(rig, body, fate):
    """A worker also repeats a call after an error that is not of botocore.

    boto3 raises RuntimeError for expired credentials, for example.
    """
    [message] = end(rig, body, backoff=Schedule([600]))
    rig.fault("*", RuntimeError("the refreshed credentials are still expired"), seconds=5)
    rig.pass_time(20)
    assert (message.fate, message.receives) == (fate, 1)


def test_one_bad_entry(rig):
    """If SQS refuses a whole batch, the worker makes a call for each of its entries."""
    end(rig, count=3)
    rig.fault(DELETE, "InvalidParameterValue")
    rig.pass_time(1)
    assert sizes(rig, DELETE) == [3, 1, 1, 1]


def test_refused_entry(rig):
    """If SQS refuses to delete a message, other deletes of the queue go on."""
    messages, runs = begin(rig, count=2)
    rig.fault(DELETE, "KmsDisabled", entries=[0])
    for run in runs:
        run.finish()
        rig.pass_time(0.2)
    assert [message.fate for message in messages] == ["hidden", "deleted"]


def test_no_visibility_timeout(rig):
    """A worker does not lose a lease if the queue's visibility timeout is 0."""
    rig.queue(VisibilityTimeout="0")
    retried(rig, 600)
    rig.pass_time(0.2)
    assert (asked(rig), rig.told("LeaseLost")) == ([600], [])


# Dead letters


@pytest.mark.parametrize(
    ("queue", "options", "expected"),
    [
        ("q", {}, (None, None)),
        ("q", {"MessageGroupId": "customer-7"}, ("customer-7", None)),
        ("q.fifo", {"MessageGroupId": "customer-7"}, ("customer-7", "its ID")),
    ],
    ids=["standard", "fair", "FIFO"],
)
@pytest.mark.parametrize("trace", ["Root=1-2-3", None])
def test_dead_letter(queue, options, expected, trace):
    """A dead letter is the unchanged message with a record. It is sent before the delete."""
    with Rig(task_default_queue=queue) as rig:
        attributes = {"FifoQueue": "true", "ContentBasedDeduplication": "true"}
        rig.queue(queue, **(attributes if "fifo" in queue else {}))
        rig.task(raises(BAD))
        message = rig.send(**options)
        message._sent.trace_header = trace
        rig.run()
        assert settling(rig) == [SEND, DELETE]
        [call] = rig.calls(SEND)
        [entry] = call.arguments["Entries"]
        assert call.arguments["QueueUrl"] == URL + queue.replace("q", "q-dlq")
        assert entry["MessageBody"] == message._sent.body
        assert list(entry["MessageAttributes"]) == [ATTRIBUTE_NAME]
        deduplication = message.message_id if expected[1] else None
        found = entry.get("MessageGroupId"), entry.get("MessageDeduplicationId")
        assert found == (expected[0], deduplication)
        header = entry.get("MessageSystemAttributes", {}).get("AWSTraceHeader")
        assert header == (trace and {"DataType": "String", "StringValue": trace})


@pytest.mark.parametrize(
    ("code", "entries"),
    [
        ("AccessDenied", None),
        ("KmsInvalidState", [0]),
        ("InternalError", [0]),
        ("InvalidParameterValue", [0]),
    ],
)
def test_dead_letter_refused(rig, code, entries, caplog):
    """If a dead letter cannot be sent, its message stays hidden, and one copy is sent later.

    The worker logs this once, and makes few calls.
    """
    [message] = given_up(rig)
    rig.fault(SEND, code, entries=entries, seconds=HOUR)
    rig.pass_time(HOUR)
    assert (message.receives, rig.calls(DELETE)) == (1, [])
    assert 5 < len(rig.calls(SEND)) < 60
    assert len(rig.calls(HIDE)) < 60
    assert len([r for r in caplog.records if "q-dlq" in r.getMessage()]) == (
        code != "InternalError"
    )
    sent = len(rig.calls(SEND))
    rig.pass_time(302)
    assert (len(rig.calls(SEND)), len(letters(rig)), message.receives) == (sent + 1, 1, 1)
    assert len(rig.calls(DELETE)) == 1


def test_record_does_not_fit(rig):
    """If a dead letter is too long for its queue, the worker sends it without the record."""
    rig.queue()
    rig.task(raises(BAD))
    message = rig.send(args=["x" * 500])
    longest = {"MaximumMessageSize": str(max(1_024, len(message._sent.body) + 50))}
    rig.sqs.set_queue_attributes(QueueUrl=URL + "q-dlq", Attributes=longest)
    rig.run()
    rig.pass_time(10)
    assert (message.fate, len(rig.calls(SEND))) == ("moved", 2)
    assert settling(rig) == [SEND, SEND, DELETE]


def test_refused_and_delivered_again(rig):
    """If a message comes back while SQS refuses its dead letter, it does not run or move twice."""
    [message] = given_up(rig)
    rig.fault(SEND, "KmsDisabled", seconds=600)
    for _ in range(20):
        rig.pass_time(30)
        message.deliver_again()
    rig.pass_time(305)
    assert (message.receives, len(rig.told("RunEnded")), len(letters(rig))) == (21, 1, 1)
    assert rig.sqs.queues[URL + "q"].messages == []


def test_many_dead_letters_wait(rig):
    """Many large dead letters that wait for SQS are all sent later, and do not run again."""
    messages = end(rig, raises(BAD), 45, args=["x" * 600_000])
    rig.fault(SEND, "KmsDisabled", seconds=20)
    rig.pass_time(920)
    assert {message.fate for message in messages} == {"dead letter"}
    assert len(rig.told("RunEnded")) == 45


@pytest.mark.parametrize("error", [None, "RequestThrottled", NO_ANSWER], ids=repr)
def test_dead_letter_sent_again(rig, error):
    """A worker sends a dead letter again if SQS does not confirm it, and only then deletes."""
    [message] = given_up(rig)
    rig.fault(SEND, error)
    rig.pass_time(20)
    assert settling(rig) == [SEND, SEND, DELETE]
    assert message.receives == 1


def test_bytes_of_batch(rig):
    """The dead letters of one batch have at most 1 MiB together, which is SQS's limit."""
    rig.task(raises(BAD))
    for size in (1, 1, 1, 450_000, 450_000):
        rig.send(args=["x" * size])
    rig.start_worker(processes=5)
    for run in [rig.begin() for _ in range(5)]:
        run.finish()
    rig.pass_time(1)
    assert (sizes(rig, SEND), sizes(rig, DELETE)) == ([4, 1], [5])


def test_some_dead_letters_sent(rig):
    """A worker deletes only those messages of a batch whose dead letters SQS has accepted."""
    given_up(rig, 3)
    rig.fault(SEND, "InternalError", entries=[1])
    rig.pass_time(0.3)
    assert (sizes(rig, SEND), sizes(rig, DELETE)) == ([3], [2])
    rig.pass_time(20)
    assert (sizes(rig, SEND), sizes(rig, DELETE)) == ([3, 1], [2, 1])


# Messages that come back


def test_done_and_delivered_again(rig):
    """A message that comes back after its task has succeeded is deleted without a run."""
    [message] = end(rig)
    rig.pass_time(1)
    message.deliver_again()
    rig.pass_time(1)
    assert (message.fate, message.receives, len(rig.told("RunEnded"))) == ("deleted", 2, 1)
    assert rig.worker.places_taken == 0


@pytest.mark.parametrize(("body", "fate"), [(returns, "deleted"), (raises(DOWN), "hidden")])
def test_delivered_again_while_settled(rig, body, fate):
    """If a message comes back while the worker settles it, a second call has the new handle."""
    rig.queue()
    rig.sqs.queues[URL + "q"].stale_handles_delete = False
    [message], [run] = begin(rig, body, backoff=Schedule([600]))
    rig.latency = 2.0
    run.finish()
    rig.pass_time(0.5)
    message.deliver_again()
    rig.pass_time(60)
    first, second = handles(rig, DELETE, HIDE)
    assert first != second
    assert (message.fate, rig.worker.places_taken) == (fate, 0)
    assert len(rig.told("RunEnded")) == 1


def test_delivered_again_before_hidden(rig):
    """A message that comes back before the worker could hide it does not run before it is due."""
    [message] = retried(rig, 600)
    ended = rig.timeline.now
    rig.fault(HIDE, AWAY, seconds=3)
    rig.pass_time(1)
    message.deliver_again()
    rig.pass_time(9)
    due_at = rig.sqs.changes[-1].at + message.delay
    assert (message.fate, rig.worker.runs) == ("hidden", [])
    assert due_at - ended == pytest.approx(600, abs=1)
    rig.pass_time(595)
    rig.run()
    assert [event.attempt for event in rig.told("RunEnded")] == [1, 2]


def test_last_receive(rig):
    """A message that comes back for its last receive runs at once, although it is not due.

    At one more receive, SQS would move it to the dead-letter queue.
    """
    rig.queue(max_receive_count=2)
    [message] = retried(rig, 600)
    rig.fault(HIDE, AWAY, seconds=3)
    message.deliver_again()
    rig.pass_time(1)
    assert len(rig.worker.runs) == 1


@pytest.mark.parametrize("is_renewing", [True, False])
def test_delivered_again_while_it_runs(rig, is_renewing):
    """A message that comes back during its run does not run twice.

    The worker keeps its lease with the newer receipt handle, even if SQS refuses a renewal with the
    old one. The second receive does not count as an attempt.
    """
    [message], [run] = begin(rig, raises(DOWN), backoff=Schedule([7]))
    if is_renewing:
        rig.latency = 2.0
        rig.fault(HIDE, VOID, entries=[0])
        rig.pass_time(10.5)
    message.deliver_again()
    rig.pass_time(5)
    assert (rig.worker.runs, rig.worker.places_taken) == ([run], 1)
    run.finish()
    rig.pass_time(5)
    queue = rig.sqs.queues[URL + "q"]
    assert handles(rig, HIDE)[-1] == queue.message_of(handles(rig, HIDE)[-1]).receipt.handle
    assert (message.fate, message.delay) == ("hidden", 7)
    rig.run()
    assert [event.attempt for event in rig.told("RunEnded")] == [1, 2]
    assert rig.told("LeaseLost") == []


def test_last_receive_during_its_run(rig):
    """If a message comes back for its last receive during its run, a failure gives it up.

    If the worker hid it, SQS would move it at the next receive without a reason.
    """
    rig.queue(max_receive_count=2)
    [message], [run] = begin(rig, raises(DOWN), backoff=Schedule([600]))
    message.deliver_again()
    run.finish()
    rig.pass_time(1)
    assert (message.fate, message.receives) == ("dead letter", 2)
    assert rig.story() == [
        "ran: retryable",
        "given up: the queue's maxReceiveCount is reached, retryable",
    ]


# Messages that are lost


def test_void_renewal(rig, caplog):
    """If SQS refuses the receipt handle in a renewal, the lease is lost.

    The end of the run settles nothing. If the message comes back, the worker deletes it.
    """
    [message], [run] = begin(rig)
    rig.fault(HIDE, VOID, entries=[0])
    rig.pass_time(11)
    assert (rig.story(), rig.worker.places_taken) == (["lost"], 0)
    assert "sqs_backoff.renewal_refused" in caplog.text
    run.finish()
    rig.pass_time(18)
    assert (len(rig.calls(HIDE)), rig.calls(DELETE)) == (1, [])
    rig.pass_time(2)
    assert (message.fate, message.receives) == ("deleted", 2)
    assert rig.story() == ["lost", "ran: succeeded"]


def test_lost_and_back(rig):
    """If a lost message comes back to the worker that still runs it, the run goes on with it."""
    [message], [run] = begin(rig)
    rig.fault(HIDE, VOID, entries=[0])
    rig.pass_time(31)
    assert (message.receives, rig.worker.runs, rig.worker.places_taken) == (2, [run], 0)
    run.finish()
    rig.pass_time(1)
    assert (message.fate, len(rig.told("RunEnded"))) == ("deleted", 1)


@pytest.mark.parametrize("renewal", ["fails", "hangs"])
def test_not_renewed_in_time(rig, renewal):
    """If a lease is not renewed in time, the run gets one notice, and still settles the message."""
    [message], [run] = begin(rig)
    if renewal == "hangs":
        rig.latency = 60.0
    rig.fault("*" if renewal == "fails" else "ReceiveMessage", AWAY, seconds=80)
    rig.pass_time(29)
    assert rig.story() == []
    rig.pass_time(2)
    assert rig.story() == ["lost"]
    rig.pass_time(48)
    assert rig.story() == ["lost"]
    run.finish()
    rig.pass_time(20 + 2 * rig.latency)
    assert (message.fate, len(rig.told("RunEnded"))) == ("deleted", 1)


@pytest.mark.parametrize("how", ["void", "not renewed"])
def test_lost_before_it_runs(rig, how):
    """A waiting message that loses its lease does not run, and this does not count as an attempt.

    If a message loses its lease during the run, the run counts as an attempt.
    """
    rig.task(raises(DOWN), backoff=Schedule([7]))
    running, waiting = rig.send(), rig.send()
    run = rig.begin()
    if how == "void":
        rig.fault(HIDE, VOID)
        rig.fault(HIDE, VOID, entries=[0], times=2)
    else:
        rig.fault("*", AWAY, seconds=60)
    rig.pass_time(59)
    assert rig.worker.places_taken == 1
    run.finish()
    rig.pass_time(30)
    while len(rig.told("RunEnded")) < 4:
        rig.run()
    by_id = {each.task_id: [] for each in (running, waiting)}
    for event in rig.told("RunEnded"):
        by_id[event.task_id].append(event.attempt)
    assert by_id[waiting.task_id][0] == 1
    assert by_id[running.task_id][:2] == [1, 2]


@pytest.mark.parametrize(("seconds", "starts"), [(29.9, True), (30, False)])
def test_start_after_freeze(rig, seconds, starts):
    """A worker that was suspended for the whole visibility timeout does not begin the task."""
    ran = []
    rig.task(lambda self: ran.append(1))
    rig.start_worker(pool="threads")
    rig.send()
    rig.pass_time(0)
    [waiting] = rig.worker.runs
    rig.worker.freeze(seconds)
    waiting.finish()
    assert bool(ran) is starts


@pytest.mark.parametrize("how", ["void", "12 hours"])
def test_loss_notice_fails(rig, how, caplog):
    """An error in the notice of a lost lease does not keep other messages from being settled."""
    messages, runs = begin(rig, count=3)
    rig.worker.break_loss_notice(RuntimeError("can't start new thread"))
    if how == "void":
        rig.fault(HIDE, VOID, entries=[0, 1, 2])
        rig.pass_time(11)
        assert rig.worker.places_taken == 0
    else:
        rig.pass_time(13 * HOUR)
    assert caplog.text.count("keeper_failed") == 3
    other = rig.send()
    for run in runs:
        run.finish()
    rig.run()
    rig.pass_time(30)
    assert {message.fate for message in (*messages, other)} == {"deleted"}


# When the worker stops


def test_stop_settles(rig):
    """A worker that stops gives its messages back, and does not wait to fill batches."""
    rig.task(returns)
    messages = [rig.send() for _ in range(3)]
    rig.begin().finish()
    run = rig.begin()
    rig.worker.stop()
    stopped_at = rig.timeline.now
    run.finish()
    assert [message.fate for message in messages] == ["deleted", "deleted", "visible"]
    assert (rig.worker.is_alive, rig.timeline.now) == (False, stopped_at)


def test_stop_during_outage(rig, caplog):
    """A worker that stops during an outage logs how many settlements SQS has not confirmed."""
    end(rig)
    rig.fault("*", AWAY, seconds=HOUR)
    rig.worker.stop()
    assert not rig.worker.is_alive
    assert "1 settled message(s)" in caplog.text
