"""What a worker asks of SQS for messages that it holds or has settled, and when."""

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
    """Send messages of a task, and begin with all; return the messages and the runs."""
    rig.task(body, **options)
    messages = [rig.send(args=args) for _ in range(count)]
    if not rig.workers:
        rig.start_worker(processes=count)
    return messages, [rig.begin() for _ in messages]


def end(rig, *args, **options):
    """Begin with tasks and end them; return their messages."""
    messages, runs = begin(rig, *args, **options)
    for run in runs:
        run.finish()
    return messages


def retried(rig, delay, count=1):
    """Run tasks that fail for a while; return their messages."""
    return end(rig, raises(DOWN), count, backoff=Schedule([delay]))


def given_up(rig, count=1):
    """Run tasks whose messages become dead letters; return the messages."""
    return end(rig, raises(BAD), count)


def sizes(rig, action):
    """How many entries each call of an action had."""
    return [len(call.arguments["Entries"]) for call in rig.calls(action)]


def asked(rig):
    """The seconds of each change of visibility that SQS was asked for."""
    return [
        entry["VisibilityTimeout"]
        for call in rig.calls(HIDE)
        for entry in call.arguments["Entries"]
    ]


def settling(rig):
    """The calls that settle, in order, without those that keep messages hidden."""
    return [call.action for call in rig.calls() if call.action in (DELETE, SEND)]


def handles(rig, *actions):
    """The receipt handles of all entries, in order; those of one message are different."""
    return [
        entry["ReceiptHandle"]
        for call in rig.calls()
        if call.action in actions
        for entry in call.arguments["Entries"]
    ]


def letters(rig):
    """What is in the dead-letter queue."""
    return rig.sqs.queues[URL + "q-dlq"].messages


# Batches


@pytest.mark.parametrize(
    ("count", "calls"),
    [(1, [(1, 0.1)]), (10, [(10, 0)]), (25, [(10, 0), (10, 0), (5, 0.1)])],
)
def test_batches(rig, count, calls):
    """A full batch goes at once, in the order of the ends; a settlement waits 0.1 s for others."""
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
    """A receive names the visibility timeout that renewals go by, also when it is not known."""
    rig.queue(VisibilityTimeout=timeout)
    rig.task(returns)
    if fault:
        rig.fault("GetQueueAttributes", fault, seconds=60)
    rig.send()
    rig.begin()
    assert rig.calls("ReceiveMessage")[-1].arguments["VisibilityTimeout"] == seconds


# Renewals


def renewal_times(rig, seconds):
    """When the visibility was changed in the next seconds, and for how long."""
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
    """A renewal comes when a third of the time is over, and asks for 10 s at least."""
    rig.queue(VisibilityTimeout=timeout)
    begin(rig)
    assert renewal_times(rig, 29 if timeout == "30" else 10) == times


def test_renewal_batches(rig):
    """Renewals go ten to a call."""
    begin(rig, count=23)
    rig.pass_time(11)
    assert sizes(rig, HIDE) == [10, 10, 3]


@pytest.mark.hazard("H16")
@pytest.mark.parametrize("ends", [Run.finish, Run.exceed_time_limit])
def test_settled_once(rig, ends):
    """A message that is hidden is not renewed, and a second report of its end changes nothing."""
    [_], [run] = begin(rig, raises(DOWN), backoff=Schedule([600]))
    ends(run)
    rig.pass_time(590)
    assert asked(rig) == [600]


@pytest.mark.hazard("H16")
def test_backoff_during_renewal(rig):
    """A backoff waits for the renewal that is under way, which would overwrite it."""
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
    """A renewal that fails is tried again soon, whatever raises, and costs no message."""
    messages, _ = begin(rig, count=5)
    rig.fault(HIDE, error, entries=entries, seconds=15)
    rig.pass_time(18)
    assert len(rig.sqs.changes) >= 5
    rig.pass_time(60)
    assert {(message.fate, message.receives) for message in messages} == {("held", 1)}
    assert rig.story() == []


@pytest.mark.hazard("H17")
def test_twelve_hours(rig):
    """Renewals end with SQS's 12 hours and never ask for more; the run is told that it is lost.

    It goes on, in one worker, and its message is deleted when it ends.
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
    """Renewals that are not permitted cost few calls, and are logged once."""
    begin(rig, count=40)
    rig.fault(HIDE, "AccessDenied", seconds=math.inf)
    rig.fault("ReceiveMessage", "AccessDenied", seconds=math.inf)
    rig.pass_time(600)
    assert 5 < len(rig.calls(HIDE)) < 30


# Settlements that fail


def test_failed_entries(rig):
    """Only the entries of a batch that failed are sent again."""
    end(rig, count=3)
    rig.fault(DELETE, "InternalError", entries=[1])
    rig.pass_time(20)
    assert sizes(rig, DELETE) == [3, 1]
    _, second, _, again = handles(rig, DELETE)
    assert again == second
    assert rig.told("Settled")[0].failed == 1


def test_long_outage(rig):
    """A delete is tried until SQS takes it, neither seldom nor in a hurry; nobody runs it again."""
    [message] = end(rig)
    rig.fault(DELETE, AWAY, seconds=1_000)
    rig.pass_time(60)
    assert 5 < len(rig.calls(DELETE)) < 60
    rig.pass_time(1_000)
    assert (message.fate, message.receives) == ("deleted", 1)


@pytest.mark.parametrize("seed", range(5))
def test_end_of_outage(seed):
    """Settlements of an outage, and those after it, are made a tenth of the timeout after it."""
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
    """A delete with a void handle is not made again; the message is deleted when it comes back."""
    [message] = end(rig)
    rig.fault(DELETE, code, entries=[0], seconds=25)
    rig.pass_time(29)
    assert sizes(rig, DELETE) == [1]
    [failed] = rig.told("SettlementFailed")
    assert (failed.action, failed.code) == ("delete", code)
    rig.pass_time(2)
    assert (message.fate, message.receives, len(rig.told("RunEnded"))) == ("deleted", 2, 1)


def test_backoff_held_up(rig):
    """A backoff that fails asks for what is left of it, and for at least a second."""
    retried(rig, 3)
    rig.fault(HIDE, "InternalError", entries=[0], seconds=6)
    rig.pass_time(10)
    seconds = [length for length, _ in groupby(asked(rig))]
    assert seconds in ([3, 2, 1], [3, 1])
    assert [change.seconds for change in rig.sqs.changes] == [1]


def test_backoff_too_late(rig):
    """A backoff is given up when the message is visible: it would end another worker's hold."""
    retried(rig, 600)
    rig.fault(HIDE, "InternalError", entries=[0], seconds=math.inf)
    rig.fault("ReceiveMessage", AWAY, seconds=math.inf)
    rig.pass_time(31)
    tries = len(rig.calls(HIDE))
    rig.pass_time(300)
    assert len(rig.calls(HIDE)) == tries > 2
    [failed] = rig.told("SettlementFailed")
    assert (failed.action, failed.code) == ("hide", None)


#: How a call fails, and whether SQS may have done what it was asked.
HOW_IT_FAILS = [
    pytest.param({"error": NO_ANSWER, "answer_lost": True}, True, id="answer lost"),
    pytest.param({"error": AWAY}, False, id="refused"),
    pytest.param({"error": "InternalError", "entries": [0]}, False, id="listed as failed"),
]


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
@pytest.mark.parametrize(("how", "may_be_done"), HOW_IT_FAILS)
def test_giving_back_fails(rig, how, may_be_done):
    """A message that SQS may have shown is not shown again; one that it has not shown is."""
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
    """A message that SQS may have shown meanwhile is not shown again after a short backoff."""
    retried(rig, 1)
    rig.fault("ReceiveMessage", AWAY, seconds=15)
    rig.fault(HIDE, **how, seconds=2)
    ended = rig.timeline.now
    rig.pass_time(9)
    is_late = rig.calls(HIDE)[-1].at > ended + 2
    assert is_late is not may_be_done


def test_backoff_without_answer(rig):
    """A backoff whose answer was lost is asked for again until it is due."""
    [message] = retried(rig, 20)
    rig.fault(HIDE, NO_ANSWER, answer_lost=True, seconds=5)
    rig.pass_time(9)
    assert asked(rig)[0] == 20
    assert 13 <= asked(rig)[-1] <= 15
    assert (message.fate, message.receives) == ("hidden", 1)


def test_denied_delete(rig, caplog):
    """An action that is not permitted is logged once for a queue, and tried again, seldom."""
    messages = end(rig, count=25)
    rig.fault(DELETE, "AccessDenied", seconds=1_200)
    rig.pass_time(1_200)
    assert len([r for r in caplog.records if "AccessDenied" in r.getMessage()]) == 1
    assert 5 < len(rig.calls(DELETE)) < 100
    rig.pass_time(61)
    assert {(message.fate, message.receives) for message in messages} == {("deleted", 1)}


@pytest.mark.parametrize(("body", "fate"), [(returns, "deleted"), (raises(DOWN), "hidden")])
def test_foreign_error(rig, body, fate):
    """An error that is not of botocore is tried again: expired credentials raise RuntimeError."""
    [message] = end(rig, body, backoff=Schedule([600]))
    rig.fault("*", RuntimeError("the refreshed credentials are still expired"), seconds=5)
    rig.pass_time(20)
    assert (message.fate, message.receives) == (fate, 1)


def test_one_bad_entry(rig):
    """A call that SQS refuses for one of its entries is made for each alone."""
    end(rig, count=3)
    rig.fault(DELETE, "InvalidParameterValue")
    rig.pass_time(1)
    assert sizes(rig, DELETE) == [3, 1, 1, 1]


def test_refused_entry(rig):
    """An entry that is refused holds up no other of its queue."""
    messages, runs = begin(rig, count=2)
    rig.fault(DELETE, "KmsDisabled", entries=[0])
    for run in runs:
        run.finish()
        rig.pass_time(0.2)
    assert [message.fate for message in messages] == ["hidden", "deleted"]


def test_no_visibility_timeout(rig):
    """A visibility timeout of zero loses no message."""
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
    """A dead letter is its message as it came, with a record, and is sent before the delete."""
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
    """A dead letter that cannot be sent stays hidden, and is one copy in the end.

    It is said once, and costs few calls.
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
    """A dead letter that is too long for its queue is sent without its record."""
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
    """A message that comes back while its dead letter is refused is not run, or sent, twice."""
    [message] = given_up(rig)
    rig.fault(SEND, "KmsDisabled", seconds=600)
    for _ in range(20):
        rig.pass_time(30)
        message.deliver_again()
    rig.pass_time(305)
    assert (message.receives, len(rig.told("RunEnded")), len(letters(rig))) == (21, 1, 1)
    assert rig.sqs.queues[URL + "q"].messages == []


def test_many_dead_letters_wait(rig):
    """Dead letters that wait for SQS are kept in memory, also large ones, and do not run again."""
    messages = end(rig, raises(BAD), 45, args=["x" * 600_000])
    rig.fault(SEND, "KmsDisabled", seconds=20)
    rig.pass_time(920)
    assert {message.fate for message in messages} == {"dead letter"}
    assert len(rig.told("RunEnded")) == 45


@pytest.mark.parametrize("error", [None, "RequestThrottled", NO_ANSWER], ids=repr)
def test_dead_letter_sent_again(rig, error):
    """A dead letter that SQS does not confirm is sent again, and its message is not deleted."""
    [message] = given_up(rig)
    rig.fault(SEND, error)
    rig.pass_time(20)
    assert settling(rig) == [SEND, SEND, DELETE]
    assert message.receives == 1


def test_bytes_of_batch(rig):
    """Dead letters go in batches of 1 MiB, which SQS counts for all together."""
    rig.task(raises(BAD))
    for size in (1, 1, 1, 450_000, 450_000):
        rig.send(args=["x" * size])
    rig.start_worker(processes=5)
    for run in [rig.begin() for _ in range(5)]:
        run.finish()
    rig.pass_time(1)
    assert (sizes(rig, SEND), sizes(rig, DELETE)) == ([4, 1], [5])


def test_some_dead_letters_sent(rig):
    """Only messages whose dead letters SQS took are deleted; the others follow."""
    given_up(rig, 3)
    rig.fault(SEND, "InternalError", entries=[1])
    rig.pass_time(0.3)
    assert (sizes(rig, SEND), sizes(rig, DELETE)) == ([3], [2])
    rig.pass_time(20)
    assert (sizes(rig, SEND), sizes(rig, DELETE)) == ([3, 1], [2, 1])


# Messages that come back


def test_done_and_delivered_again(rig):
    """A message that is done is deleted when it comes back: SQS delivers at least once."""
    [message] = end(rig)
    rig.pass_time(1)
    message.deliver_again()
    rig.pass_time(1)
    assert (message.fate, message.receives, len(rig.told("RunEnded"))) == ("deleted", 2, 1)
    assert rig.worker.places_taken == 0


@pytest.mark.parametrize(("body", "fate"), [(returns, "deleted"), (raises(DOWN), "hidden")])
def test_delivered_again_while_settled(rig, body, fate):
    """A message that comes back while it is settled is settled with the newer handle, too."""
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
    """A message that comes back before it could be hidden is not run early."""
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
    """A message at its last receive runs early, for SQS would move it at the next one."""
    rig.queue(max_receive_count=2)
    [message] = retried(rig, 600)
    rig.fault(HIDE, AWAY, seconds=3)
    message.deliver_again()
    rig.pass_time(1)
    assert len(rig.worker.runs) == 1


@pytest.mark.parametrize("is_renewing", [True, False])
def test_delivered_again_while_it_runs(rig, is_renewing):
    """A message that comes back during its run is kept by the newer handle, and not run twice.

    The answer to a renewal with the old handle says nothing of the new one. It is no attempt.
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
    """A run learns that its message is back for the last time; SQS would move it without a word."""
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
    """A message whose handle SQS refuses is lost: its end settles nothing, and it may come back."""
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
    """A run whose message comes back after its loss goes on with it, in this worker."""
    [message], [run] = begin(rig)
    rig.fault(HIDE, VOID, entries=[0])
    rig.pass_time(31)
    assert (message.receives, rig.worker.runs, rig.worker.places_taken) == (2, [run], 0)
    run.finish()
    rig.pass_time(1)
    assert (message.fate, len(rig.told("RunEnded"))) == ("deleted", 1)


@pytest.mark.parametrize("renewal", ["fails", "hangs"])
def test_not_renewed_in_time(rig, renewal):
    """A run is told once that its message was not renewed in time, and still settles it."""
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
    """A message that is lost while it waits is not run; only of one that runs it is an attempt."""
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
    """A worker that stood still for as long as the hold starts no task, before it has noticed."""
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
    """A run that cannot be told of a loss keeps no place, and stops no settlement."""
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


# The end of the worker


def test_stop_settles(rig):
    """A worker that stops gives back what it holds, and does not wait to fill batches."""
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
    """A worker that stops says what it could not tell SQS."""
    end(rig)
    rig.fault("*", AWAY, seconds=HOUR)
    rig.worker.stop()
    assert not rig.worker.is_alive
    assert "1 settled message(s)" in caplog.text
