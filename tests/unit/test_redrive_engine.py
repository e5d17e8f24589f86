"""What a redrive does when SQS, a file or a message is not as it should be. In virtual time."""

import json
import threading
import time
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace

import pytest
from botocore.exceptions import (
    ClientError,
    NoCredentialsError,
    ReadTimeoutError,
    SSLError,
)

from benchmarks.redrive import _move_endless
from celery_sqs_backoff.commands import progress
from celery_sqs_backoff.commands.show import describe_cost
from celery_sqs_backoff.redrive import run as run_module
from celery_sqs_backoff.redrive.events import (
    Ended,
    Failed,
    Finished,
    InDoubt,
    MessagesSent,
    Progress,
    RunWaits,
    Skipped,
    Started,
)
from celery_sqs_backoff.redrive.files import NoJournal
from celery_sqs_backoff.redrive.halt import Halt
from celery_sqs_backoff.redrive.ledger import Ledger
from celery_sqs_backoff.redrive.message import DlqMessage
from celery_sqs_backoff.redrive.sweep import Sweep
from celery_sqs_backoff.sqs.dead_letter import ATTRIBUTE_NAME, REPLAY_ATTRIBUTE
from celery_sqs_backoff.sqs.envelope import iso_time
from tests.integration.redrive_stage import task
from tests.support.fake_sqs import Clock, Fault
from tests.support.processes import eventually
from tests.support.redrive_world import Killed, World

SEND, DELETE = "SendMessageBatch", "DeleteMessageBatch"
CHANGE, RECEIVE = "ChangeMessageVisibilityBatch", "ReceiveMessage"


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def ids(world, kind):
    return [id_ for event in world.events if isinstance(event, kind) for id_ in event.ids]


def bodies(count, start=0):
    return [f"m{n}" for n in range(start, start + count)]


def text(value):
    return {"DataType": "String", "StringValue": value}


def always(world, action, error, times=10_000):
    world.sqs.faults += [Fault(action, error)] * times


# Deleting


def test_denied_delete(world):
    """A denied delete stops the run after one batch, and the next run deletes it by its journal."""
    world.fill(*bodies(200))
    always(world, DELETE, "AccessDenied")
    report = world.redrive()
    assert (report.ended, report.sent, report.not_deleted) == (Ended.UNREACHABLE, 10, 10)
    assert "AccessDenied" in report.detail
    assert world.redrive().sent <= 10
    world.sqs.faults.clear()
    world.clock.now += 31
    report = world.redrive()
    assert (report.ended, report.deleted, report.remaining) == (Ended.DONE, 200, 0)
    assert world.bodies(world.main) == Counter(bodies(200))


def test_failing_deletes(world):
    """The run stops within 110 sends when SQS deletes nothing.

    These deletes fail with an internal error and not for a missing permission.
    """
    world.fill(*bodies(1_000))
    world.redrive(limit=10)
    always(world, DELETE, "InternalError")
    report = world.redrive()
    assert report.ended is Ended.UNREACHABLE
    assert report.sent <= 110


# Messages written by strangers


def test_delete_hopeless_messages(world, monkeypatch):
    """With ``delete``, the run also deletes poison and unreadable messages.

    It deletes messages without a destination, too.
    """
    world.fill("poison", MessageAttributes={REPLAY_ATTRIBUTE: text('{"replays":99}')})
    (hostile,) = world.fill("hostile")
    monkeypatch.setattr(
        DlqMessage, "unreadable", property(lambda m: "x" if m.id == hostile else None)
    )
    nowhere = text('{"origin":"arn:aws:sqs:us-east-1:1:nowhere","outcome":"UNKNOWN"}')
    world.fill("nowhere", MessageAttributes={ATTRIBUTE_NAME: nowhere})
    report = world.redrive(delete=True, dump="not written here")
    assert (report.dropped, report.deleted, report.sent, report.remaining) == (3, 3, 0, 0)
    assert not world.bodies(world.main)


def test_unknown_outcome(world):
    """The run sends messages with an unknown outcome only on request.

    Their work may have been done already.
    """
    world.fill("a", MessageAttributes={ATTRIBUTE_NAME: text('{"outcome":"UNKNOWN"}')})
    world.fill("b", MessageAttributes={ATTRIBUTE_NAME: text('{"outcome":"RETRYABLE"}')})
    report = world.redrive()
    assert (report.sent, report.skipped, report.unknown) == (1, 1, 1)
    assert world.redrive(include_unknown=True, outcome="unknown").sent == 1


# Ending


def test_hidden_elsewhere(world):
    """The run ends incomplete when another consumer hides messages."""
    world.fill(*bodies(10))
    world.sqs.receive_message(
        QueueUrl=world.source.url, MaxNumberOfMessages=4, VisibilityTimeout=600
    )
    report = world.redrive()
    assert (report.ended, report.sent, report.remaining) == (Ended.INCOMPLETE, 6, 4)
    assert "4 messages could not be received" in report.detail


def test_filter_beyond_in_flight_limit(world, monkeypatch):
    """The run reports that its filter leaves more messages than SQS can hide.

    It blamed another consumer, and another run in some minutes would have ended in the same way.
    """
    monkeypatch.setattr(run_module, "MAX_IN_FLIGHT_MESSAGES", 20)
    world.sqs.queues[world.source.url].max_in_flight = 20
    world.fill(*bodies(30))
    report = world.redrive(task="other.*")
    assert (report.ended, report.skipped) == (Ended.INCOMPLETE, 20)
    assert report.detail.startswith("10 messages could not be received: SQS hides at most 20")
    assert "somebody else" not in report.detail


def test_fifo_filter(tmp_path):
    """The run ends incomplete when a filter leaves a message of a FIFO group.

    SQS gives out no message behind it, and waiting does not help.
    """
    world = World(tmp_path, fifo=True)
    for n in range(12):
        world.fill(f"{n}", MessageGroupId="g", MessageDeduplicationId=f"{n}")
    wanted = [m.id for m in world.sqs.queues[world.source.url].messages if m.body != "3"]
    report = world.redrive(ids=wanted)
    assert (report.ended, report.skipped) == (Ended.INCOMPLETE, 1)
    assert "behind a message of their group that was left" in report.detail
    assert "Wait" not in report.detail, "another run would end like this one"


def test_doubt_settled_by_absence(world):
    """The run settles messages that a killed run left in doubt once they are gone."""
    world.fill(*bodies(10))
    world.journal_path.write_text(
        f'{{"source":"{world.source.arn}","run":"r1"}}\n'
        f'{{"is":"sending","ids":["gone-1","gone-2"],"at":{world.clock.now - 86_400}}}\n'
    )
    world.journal_path.chmod(0o600)
    before = world.clock.now
    report = world.redrive()
    assert (report.sent, report.in_doubt) == (10, 0)
    assert world.clock.now - before < 10, "a run of yesterday is not waited for"
    world.events.clear()
    world.fill("x")
    world.redrive()
    assert not ids(world, InDoubt)


def test_sent_despite_low_count(world, monkeypatch):
    """The run still deletes messages that a killed run sent when SQS counts too few.

    Counts of SQS are approximate, and may leave out messages that the killed run hides.
    """
    world.fill(*bodies(10))
    world.dies_at = (6, False)
    with pytest.raises(Killed):
        world.redrive()
    world.dies_at = None
    assert world.bodies(world.main), "sent, and not deleted"
    with monkeypatch.context() as patch:
        patch.setattr(world.sqs.queues[world.source.url].__class__, "counts", lambda self: {})
        assert world.redrive().ended is Ended.DONE
    world.clock.now += 31
    report = world.redrive()
    assert (report.sent, report.deleted) == (0, 10)
    assert world.bodies(world.main) == Counter(bodies(10)), "none is sent twice"


def test_returned_messages(world):
    """Messages that come back are poison, and stop the run.

    The provider is still down. The run sees its own messages again, and does not loop.
    """
    world.fill(*bodies(60))
    main, source = (world.sqs.queues[queue.url].messages for queue in (world.main, world.source))

    def give_up(event):
        if isinstance(event, Started):
            del source[:40]  # 60 are counted: what comes back has room
        while isinstance(event, MessagesSent) and main:
            message = main.pop()
            world.fill(message.body, MessageAttributes=message.attributes)

    world.on_event = give_up
    report = world.redrive()
    assert report.ended is Ended.GATE
    assert report.returned == report.poison >= 10
    assert world.bodies(world.source) == Counter(bodies(20, start=40))


# Holding


def test_rare_matches(tmp_path):
    """A filter that matches little finds all matches, with at most a quarter of a call per message.

    With 120 ms per call and one worker the run takes minutes, and holds must outlast that.
    """
    world = World(tmp_path, latency=0.12)
    world.fill(*bodies(3_000))
    wanted = [m.id for m in world.sqs.queues[world.source.url].messages[-30:]]
    report = world.redrive(ids=wanted)
    assert (report.ended, report.sent, report.skipped) == (Ended.DONE, 30, 2_970)
    assert sum(world.calls.values()) <= 0.25 * 3_000
    assert len(ids(world, Skipped)) == 2_970
    assert not world.sqs.queues[world.source.url].in_flight(), "all is given back"


@pytest.mark.parametrize("limit", [1, 3])
def test_limit_with_filter(world, limit):
    """With a filter and a limit, the run does not receive messages one by one.

    One matching message in a queue of 20,000 took 20,000 calls.
    """
    world.fill(*bodies(500))
    wanted = [m.id for m in world.sqs.queues[world.source.url].messages[-12:]]
    assert world.redrive(ids=wanted, limit=limit).sent == limit
    assert world.calls["receive_message"] <= 60
    assert not world.sqs.queues[world.source.url].in_flight(), "all is given back"


def test_limit_alone(world):
    """With a limit, the run receives no more messages than it sends."""
    world.fill(*bodies(100))
    assert world.redrive(limit=3).sent == 3
    assert world.calls["change_message_visibility_batch"] == 0, "nothing is to be given back"


@pytest.mark.parametrize(("messages", "latency"), [(4_000, 0.15), (1_200, 2.5)])
def test_copy_long_queue(tmp_path, messages, latency):
    """A copy of a long queue ends, and is written batch by batch.

    With one thread, the second case takes five times as long as a receive hides a message.
    """
    world = World(tmp_path, latency=latency)
    for n in range(messages):
        reason = text(json.dumps({"reason": f"{n}"}))
        world.fill(f"m{n}", MessageAttributes={ATTRIBUTE_NAME: reason})
    written = []
    copy = SimpleNamespace(
        write=lambda messages, destinations: written.append([m.id for m in messages])
    )
    plan = world.look(copy=copy)
    assert (plan.looked_at, plan.matching) == (messages, messages)
    assert len({id_ for batch in written for id_ in batch}) == sum(map(len, written)) == messages
    assert max(map(len, written)) <= 10
    assert world.calls["receive_message"] <= messages / 10 + 10, "nothing is shown again meanwhile"
    assert not any(letter.raw for letter in plan.letters)
    assert not world.sqs.queues[world.source.url].in_flight(), "all is given back"


# Errors


def test_throttling(world):
    """The run waits when SQS throttles its sends, and then sends all messages."""
    world.fill(*bodies(20))
    world.sqs.faults += [Fault(SEND, "ThrottledException")] * 4
    report = world.redrive()
    assert (report.ended, report.sent, report.failed) == (Ended.DONE, 20, 0)


@pytest.mark.parametrize(
    "error",
    [NoCredentialsError(), SSLError(endpoint_url="x", error="y"), ValueError("bug")],
    ids=lambda error: type(error).__name__,
)
def test_local_errors(world, error):
    """An error of the local machine ends the run and puts no message in doubt.

    An SSL error may come in mid-request, so its messages may be in doubt.
    """
    world.fill(*bodies(20))
    always(world, SEND, error)
    report = world.redrive()
    assert (report.ended, report.sent, report.remaining) == (Ended.UNREACHABLE, 0, 20)
    if not isinstance(error, SSLError):  # in mid-request, for all that is known
        assert report.in_doubt == 0


def test_callback_raises_at_start(world):
    """The run sends nothing if ``on_event`` raises at the start.

    A caller that raises at ``Started``, because of too many messages, wants to end the run. One
    batch was still sent.
    """
    world.fill(*bodies(50))

    def refuse(event):
        if isinstance(event, Started):
            raise LookupError("not so many")

    world.on_event = refuse
    with pytest.raises(LookupError, match="not so many"):
        world.redrive()
    assert not world.bodies(world.main)
    assert world.events[-1].ended == "error"


@pytest.mark.parametrize("kind", ["sending", "sent", "deleted", "ended"])
def test_full_disk(world, monkeypatch, kind):
    """A run whose journal is on a full disk ends, and deletes all messages that it has sent.

    The line that fails is one of the second batch, or the last.
    """
    world.fill(*bodies(50))
    written = Counter()

    def write(journal, is_, ids, at=0.0):
        written[is_] += bool(ids)
        if written[kind] > 1 or is_ == kind == "ended":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("tests.support.redrive_world._Journal.write", write)
    report = world.redrive()
    assert report.ended is Ended.FAILED
    assert "No space left" in report.detail
    sent = {"sending": 10, "ended": 50}.get(kind, 20)
    assert report.sent == report.deleted == sent
    assert world.bodies(world.main) + world.bodies(world.source) == Counter(bodies(50))
    assert isinstance(world.events[-1], Finished)


def test_unanswered_sends(world):
    """Sends without a response put 20 messages in doubt, not the whole queue."""
    world.fill(*bodies(100))
    always(world, SEND, ReadTimeoutError(endpoint_url="x"))
    report = world.redrive()
    assert (report.ended, report.sent, report.in_doubt) == (Ended.UNREACHABLE, 0, 20)


# Deletes that SQS accepts and does not do


def show_one_to_a_peek(world):
    """Between the first send and its delete: the delete has an older handle, and does nothing."""
    queue = world.sqs.queues[world.source.url]
    queue.stale_handles_delete = False
    queue.messages[0].visible_at = world.clock.now
    world.sqs.receive_message(QueueUrl=world.source.url, MaxNumberOfMessages=1, VisibilityTimeout=0)


@pytest.mark.parametrize("ends", ["killed", "deletes fail"])
def test_ignored_delete(world, ends):
    """The next run recognises a message that SQS did not delete, and does not send it again."""
    world.fill(*bodies(11))
    seen = []

    def step():
        if world.calls["delete_message_batch"] == 1 and not seen:
            seen.append(show_one_to_a_peek(world))
        if world.calls["delete_message_batch"] == 2:  # of the message that came again
            if ends == "killed":
                world.dies_at = (world.steps, False)
            world.sqs.faults = [Fault(DELETE, "InternalError")] * 40

    world.before_step = step
    with suppress(Killed):
        assert world.redrive().not_deleted == 2
    world.before_step, world.dies_at = (lambda: None), None
    world.sqs.faults.clear()
    world.clock.now += 60
    report = world.redrive()
    assert (report.ended, report.in_doubt) == (Ended.DONE, 0)
    assert world.bodies(world.main) == Counter(bodies(11))


# Telling


def test_callback_raises_late():
    """A callback that raises late ends the run with its error.

    By then, all messages are sent and deleted, and the run has ended.
    """

    def on_event(event):
        if isinstance(event, MessagesSent):
            time.sleep(1)
            raise LookupError("late")

    with pytest.raises(LookupError, match="late"):
        _move_endless(10, on_event=on_event)


def test_callback_blocks():
    """A callback that blocks stops no call.

    With Ctrl-S on the terminal, the run deleted nothing and renewed no hold until Ctrl-Q.
    """
    blocked, let_go = threading.Event(), threading.Event()

    def on_event(event):
        if isinstance(event, MessagesSent):
            blocked.set()
            let_go.wait(60)

    queues = []
    running = threading.Thread(
        target=lambda: queues.append(_move_endless(500, on_event=on_event)[:2])
    )
    running.start()
    assert blocked.wait(60)
    eventually(lambda: not any(t.name.startswith("redrive-keeper") for t in threading.enumerate()))
    assert running.is_alive(), "all is moved; it waits for the callback at its end"
    let_go.set()
    running.join(60)
    ((report, _queue),) = queues
    assert (report.ended, report.sent, report.deleted) == (Ended.DONE, 500, 500)


def test_many_threads():
    """Sixteen threads do not take each other's pending deletes for refused ones.

    More than a hundred messages are sent and not yet deleted at any time.
    """
    report, queue, _ = _move_endless(3_000, latency=0.002)
    assert (report.ended, report.sent, report.deleted) == (Ended.DONE, 3_000, 3_000)
    assert sum(queue.calls.values()) <= 0.3 * 3_000 + 20


def test_progress_of_delete(world):
    """The progress counts the messages that are deleted without being sent.

    The bar of ``--delete`` stood at "0/30 ... 0 s left" to its end.
    """
    expired = [task(expires=iso_time(world.clock() - 1)) for _ in range(10)]
    world.fill(*expired, *bodies(20))
    world.redrive(delete=True, dump="d")
    last = [event for event in world.events if isinstance(event, Progress)][-1]
    assert (last.sent, last.dropped, last.to_send) == (0, 30, 30)
    assert progress._facts(last).startswith("30/30 ")


@pytest.mark.parametrize("options", [{"limit": 1}, {}], ids=["limit", "all"])
def test_slow_run_ends(world, options):
    """A slow run ends with its last message.

    It waited for the slot of one more: for an hour, at one per hour.
    """
    world.fill("m", *bodies(2 if options else 0))
    began = world.clock()
    assert world.redrive(rate="1/h", **options).sent == 1
    assert world.clock() - began < 60


def test_rate_with_slow_calls(tmp_path):
    """Slow calls do not lower the rate.

    From a laptop a call takes a quarter of a second: at 20/s it was 5/s.
    """
    world = World(tmp_path, latency=0.25, threads=None)
    world.fill(*bodies(400))
    began = world.clock.now
    report = world.redrive(rate="20/s")
    assert report.sent == 400
    assert world.clock.now - began < 1.4 * 400 / 20


@pytest.mark.parametrize(("seconds", "in_doubt"), [(200, 0), (1_000, 1)])
def test_fifo_doubt(tmp_path, seconds, in_doubt):
    """A FIFO queue settles a doubt for five minutes only.

    Then SQS has forgotten the deduplication id, and the message is there twice.
    """
    world = World(tmp_path, fifo=True)
    world.fill("m", MessageGroupId="g", MessageDeduplicationId="d")
    world.dies_at = (4, True)  # depth, receive, journal, send
    with pytest.raises(Killed):
        world.redrive()
    world.dies_at = None
    world.clock.now += seconds
    report = world.redrive(include_unknown=True)
    assert (report.sent, report.in_doubt) == (1, in_doubt)
    assert world.bodies(world.main) == {"m": 1 + in_doubt}


def test_deletes_in_doubt(world):
    """The run tells messages that were never received from sent ones whose delete is in doubt.

    SQS has deleted ten messages and its responses are lost. It still counts the ten that the run
    has not received.
    """
    world.fill(*bodies(20))
    lost = ReadTimeoutError(endpoint_url="x")
    world.sqs.faults += [Fault(RECEIVE, None, after=True), *[Fault(DELETE, lost, after=True)] * 6]
    report = world.redrive(journal=False)
    assert (report.sent, report.deleted, report.remaining) == (10, 10, 10)
    assert report.ended is Ended.INCOMPLETE


def fill_one_group(world, count):
    for body in bodies(count):
        world.fill(body, MessageGroupId="g", MessageDeduplicationId=body)


def test_fifo_group_after_refusal(tmp_path):
    """A FIFO group waits for a message that SQS refused in an earlier receive."""
    world = World(tmp_path, fifo=True)
    fill_one_group(world, 15)

    def refused_and_suspended(event):
        if isinstance(event, MessagesSent) and len(ids(world, MessagesSent)) == 8:
            world.sqs.faults.append(Fault(SEND, "InvalidMessageContents"))
        elif isinstance(event, Failed):
            world.clock.now += 400

    world.on_event = refused_and_suspended
    report = world.redrive()
    assert report.sent == 8, "those after it stay"


def test_denied_delete_without_send(world):
    """With ``delete``, the report of a denied delete does not speak of sent messages."""
    world.fill(*bodies(3))
    always(world, DELETE, "AccessDenied")
    report = world.redrive(delete=True, dump="not written here")
    assert (report.ended, report.failed, report.sent) == (Ended.UNREACHABLE, 3, 0)
    assert report.detail.startswith("DeleteMessageBatch: AccessDenied. ")
    assert "sent" not in report.detail


def proxy_refuses(world):
    """Sends of more than two messages are too big for a proxy on the way."""

    def send(**request):
        if len(request["Entries"]) > 2 or "big" in str(request["Entries"]):
            world.sqs.faults.append(Fault(SEND, TOO_LARGE))
        return send_message_batch(**request)

    send_message_batch, world.sqs.send_message_batch = world.sqs.send_message_batch, send


TOO_LARGE = ClientError(
    {"Error": {"Code": "413", "Message": ""}, "ResponseMetadata": {"HTTPStatusCode": 413}}, SEND
)


def test_batch_too_big_for_proxy(world):
    """The run sends messages one by one when a batch is too big for a proxy.

    HTTP 413 ended the whole run, and no message could be replayed from behind that proxy.
    """
    world.fill("big", *bodies(9))
    proxy_refuses(world)
    report = world.redrive()
    assert (report.ended, report.sent, report.failed) == (Ended.DONE, 9, 1)
    assert {event.reason for event in world.events if isinstance(event, Failed)} == {"413"}


@pytest.mark.parametrize(("seconds", "is_hold"), [(10, True), (20, False)])
def test_late_renewal(seconds, is_hold):
    """A renewal that may have come too late does not count as a hold.

    SQS takes an old handle: two runs had the same message, and each sent it.
    """
    clock = Clock(1_000.0)

    def hide(handles, seconds_hidden):
        clock.now += seconds
        return [None] * len(handles)

    ledger = Ledger(NoJournal(), None, clock, 30)
    source, halt = SimpleNamespace(hide=hide), Halt(clock=clock)
    sweep = Sweep(source, ledger, halt, None, None, hold_seconds=30, patient_until=0.0)
    message = DlqMessage({"MessageId": "a", "ReceiptHandle": "a#1", "Body": "b"})
    ledger.enter(0, [message], clock.now + 15)
    clock.now += 1
    sweep.renew()
    assert (ledger.still_ours([message]) == [message]) is is_hold
    if not is_hold:
        assert sweep.patient_until > clock.now + 10, "it may be hidden for us"


def test_killed_between_batches(world):
    """A run waits for the messages that a killed run still hides.

    No message was in doubt, and the run took the hidden messages for another consumer's.
    """
    world.fill(*bodies(20))

    def dies():
        if world.calls["receive_message"] == 2:
            world.dies_at = (world.steps, True)

    world.before_step = dies
    with pytest.raises(Killed):
        world.redrive()
    world.before_step, world.dies_at = lambda: world.run._every_second(), None
    assert len(world.sqs.queues[world.source.url].in_flight()) == 10
    report = world.redrive()
    assert (report.ended, report.sent, report.remaining) == (Ended.DONE, 10, 0)
    (wait,) = (event for event in world.events if isinstance(event, RunWaits))
    assert wait.messages == 10
    assert 0 < wait.seconds < 31, "a minute and a half without a word"


def test_not_given_back(world):
    """A peek reports how many messages SQS has not given back."""
    world.fill(*bodies(15))
    always(world, CHANGE, "AccessDenied")
    plan = world.look()
    assert (plan.looked_at, plan.not_given_back) == (15, 15)
    assert "15 of them" in describe_cost(plan)
    world.sqs.faults.clear()
    world.clock.now += 61
    plan = world.look()
    assert plan.not_given_back == 0
    assert describe_cost(plan).endswith("and given back.")
