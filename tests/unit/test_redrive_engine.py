"""What a redrive does if SQS, a file or a message is not as it should be. Time is virtual.

A run is one redrive. It receives each dead letter, sends it to its queue, and deletes it. While the
run has a message, it hides the message from other consumers. A message is in doubt if SQS has not
answered a send, so that the message may or may not have been sent.
"""

import json
import threading
import time
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace

import pytest
from botocore.exceptions import (
    ClientError,
    ConnectTimeoutError,
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
from celery_sqs_backoff.redrive.halt import TRIES, Halt
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
    """If SQS denies deletes, the run ends after one batch.

    The journal names this batch, so a later run deletes it and does not send it again.
    """
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
    """If all deletes fail with an internal error, the run ends after at most 110 sends."""
    world.fill(*bodies(1_000))
    world.redrive(limit=10)
    always(world, DELETE, "InternalError")
    report = world.redrive()
    assert report.ended is Ended.UNREACHABLE
    assert report.sent <= 110


# Messages written by strangers


def test_delete_hopeless_messages(world, monkeypatch):
    """With ``delete``, the run also deletes messages that it would never send.

    These were replayed too often, cannot be read, or have no destination.
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
    """The run sends messages with the outcome UNKNOWN only on request.

    The work of their tasks may have been done already.
    """
    world.fill("a", MessageAttributes={ATTRIBUTE_NAME: text('{"outcome":"UNKNOWN"}')})
    world.fill("b", MessageAttributes={ATTRIBUTE_NAME: text('{"outcome":"RETRYABLE"}')})
    report = world.redrive()
    assert (report.sent, report.skipped, report.unknown) == (1, 1, 1)
    assert world.redrive(include_unknown=True, outcome="unknown").sent == 1


# How a run ends


def test_hidden_elsewhere(world):
    """If another consumer hides messages, the run ends as incomplete and reports their number."""
    world.fill(*bodies(10))
    world.sqs.receive_message(
        QueueUrl=world.source.url, MaxNumberOfMessages=4, VisibilityTimeout=600
    )
    report = world.redrive()
    assert (report.ended, report.sent, report.remaining) == (Ended.INCOMPLETE, 6, 4)
    assert "4 messages could not be received" in report.detail


def test_filter_beyond_in_flight_limit(world, monkeypatch):
    """If a filter leaves out more messages than SQS can hide at a time, the run says so.

    The run hides these messages until its end. It does not blame another consumer.
    """
    monkeypatch.setattr(run_module, "MAX_IN_FLIGHT_MESSAGES", 20)
    world.sqs.queues[world.source.url].max_in_flight = 20
    world.fill(*bodies(30))
    report = world.redrive(task="other.*")
    assert (report.ended, report.skipped) == (Ended.INCOMPLETE, 20)
    assert report.detail.startswith("10 messages could not be received: SQS hides at most 20")
    assert "somebody else" not in report.detail


def test_fifo_filter(tmp_path):
    """If a filter leaves out a message of a FIFO group, the run ends as incomplete.

    SQS does not deliver the later messages of the group. The run does not advise to wait.
    """
    world = World(tmp_path, fifo=True)
    for n in range(12):
        world.fill(f"{n}", MessageGroupId="g", MessageDeduplicationId=f"{n}")
    wanted = [m.id for m in world.sqs.queues[world.source.url].messages if m.body != "3"]
    report = world.redrive(ids=wanted)
    assert (report.ended, report.skipped) == (Ended.INCOMPLETE, 1)
    assert "behind a message of their group that stays" in report.detail
    assert "Wait" not in report.detail, "another run would end like this one"


def test_doubt_settled_by_absence(world):
    """If messages that a killed run left in doubt are no longer on the queue, the doubt ends."""
    world.fill(*bodies(10))
    world.journal_path.write_text(
        f'{{"source":"{world.source.arn}","run":"r1"}}\n'
        f'{{"is":"sending","ids":["gone-1","gone-2"],"at":{world.clock.now - 86_400}}}\n'
    )
    world.journal_path.chmod(0o600)
    before = world.clock.now
    report = world.redrive()
    assert (report.sent, report.in_doubt) == (10, 0)
    assert world.clock.now - before < 10, "a run that was killed yesterday hides no message today"
    world.events.clear()
    world.fill("x")
    world.redrive()
    assert not ids(world, InDoubt)


def test_sent_despite_low_count(world, monkeypatch):
    """Messages that a killed run has sent are not sent again, even if SQS's counts miss them.

    SQS's counts are approximate. They may miss messages that the killed run hides.
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


@pytest.mark.parametrize("dies_at", [(4, True), (6, False)], ids=["in doubt", "sent"])
def test_journal_while_others_arrive(world, dies_at):
    """A run forgets no message of its journal while new dead letters arrive.

    The run looks at as many messages as there were at its start. New dead letters may use up this
    number, so that the run does not receive a message that is still on the queue.
    """
    world.fill(*bodies(40))
    world.dies_at = dies_at
    with pytest.raises(Killed):
        world.redrive()
    world.dies_at = None
    world.clock.now += 3600
    world.arrive(40)
    world.redrive()
    assert max(world.bodies(world.main).values()) == 1
    world.on_event = lambda event: None
    world.clock.now += 60
    world.redrive()
    assert max(world.bodies(world.main).values()) == 1


def test_old_doubt_while_others_arrive(world):
    """A message in doubt that has left the queue is not reported, although new ones arrive."""
    world.journal_path.write_text(
        f'{{"source":"{world.source.arn}","run":"r1"}}\n'
        f'{{"is":"sending","ids":["gone-1"],"at":{world.clock.now - 86_400}}}\n'
    )
    world.journal_path.chmod(0o600)
    world.fill(*bodies(10))
    world.arrive(1)
    assert world.redrive().in_doubt == 0


def test_returned_messages(world):
    """If sent messages come back as dead letters, the run ends and does not send them again.

    Their provider is probably still down.
    """
    world.fill(*bodies(60))
    main, source = (world.sqs.queues[queue.url].messages for queue in (world.main, world.source))

    def give_up(event):
        if isinstance(event, Started):
            del source[:40]  # the run looks at 60, so it also looks at those that come back
        while isinstance(event, MessagesSent) and main:
            message = main.pop()
            world.fill(message.body, MessageAttributes=message.attributes)

    world.on_event = give_up
    report = world.redrive()
    assert report.ended is Ended.GATE
    assert report.returned == report.poison >= 10
    assert world.bodies(world.source) == Counter(bodies(20, start=40))


# Hiding messages from other consumers


def test_rare_matches(tmp_path):
    """If a filter matches 30 of 3,000 messages, the run finds all 30 with at most 750 calls.

    The run takes minutes. It hides the other messages until its end, so that it receives each once.
    """
    world = World(tmp_path, latency=0.12)
    world.fill(*bodies(3_000))
    wanted = [m.id for m in world.sqs.queues[world.source.url].messages[-30:]]
    report = world.redrive(ids=wanted)
    assert (report.ended, report.sent, report.skipped) == (Ended.DONE, 30, 2_970)
    assert sum(world.calls.values()) <= 0.25 * 3_000
    assert len(ids(world, Skipped)) == 2_970
    assert not world.sqs.queues[world.source.url].in_flight(), "the run shows all messages again"


@pytest.mark.parametrize("limit", [1, 3])
def test_limit_with_filter(world, limit):
    """With a filter and a limit, the run still receives messages in batches."""
    world.fill(*bodies(500))
    wanted = [m.id for m in world.sqs.queues[world.source.url].messages[-12:]]
    assert world.redrive(ids=wanted, limit=limit).sent == limit
    assert world.calls["receive_message"] <= 60
    assert not world.sqs.queues[world.source.url].in_flight(), "the run shows all messages again"


def test_limit_alone(world):
    """With a limit, the run receives no more messages than it sends."""
    world.fill(*bodies(100))
    assert world.redrive(limit=3).sent == 3
    assert world.calls["change_message_visibility_batch"] == 0, "no message is left to show again"


@pytest.mark.parametrize(("messages", "latency"), [(4_000, 0.15), (1_200, 2.5)])
def test_copy_long_queue(tmp_path, messages, latency):
    """A look at a long queue copies each message once, and writes the copies in batches.

    The second case takes five times as long as a receive hides a message. So the look must keep
    messages hidden until its end.
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
    assert world.calls["receive_message"] <= messages / 10 + 10, "no message is received twice"
    assert not any(letter.raw for letter in plan.letters)
    assert not world.sqs.queues[world.source.url].in_flight(), "the look shows all messages again"


# Errors


def test_throttling(world):
    """If SQS throttles sends, the run waits and then sends all messages."""
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
    """If the local machine cannot make a call, the run ends and puts no message in doubt.

    An SSL error may come after the request was sent. So it may put messages in doubt.
    """
    world.fill(*bodies(20))
    always(world, SEND, error)
    report = world.redrive()
    assert (report.ended, report.sent, report.remaining) == (Ended.UNREACHABLE, 0, 20)
    if not isinstance(error, SSLError):
        assert report.in_doubt == 0


def test_callback_raises_at_start(world):
    """If ``on_event`` raises at the event ``Started``, the run sends nothing and raises.

    In this way a caller can refuse a queue with too many messages.
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
    """If the disk of the journal is full, the run ends and deletes all messages that it has sent.

    The journal fails at a line about the second batch, or at its last line.
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
    """If SQS answers no send, the run ends after two batches, with 20 messages in doubt."""
    world.fill(*bodies(100))
    always(world, SEND, ReadTimeoutError(endpoint_url="x"))
    report = world.redrive()
    assert (report.ended, report.sent, report.in_doubt) == (Ended.UNREACHABLE, 0, 20)


# Deletes that SQS confirms but does not carry out


def let_other_receive(world):
    """Let another consumer receive the first message, so that the run's delete does nothing.

    The run's delete has the handle of an earlier receive.
    """
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
            seen.append(let_other_receive(world))
        if world.calls["delete_message_batch"] == 2:  # after the run has received it again
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


# Events and reports


def test_callback_raises_late():
    """If ``on_event`` raises after all messages were sent and deleted, the run still raises."""

    def on_event(event):
        if isinstance(event, MessagesSent):
            time.sleep(1)
            raise LookupError("late")

    with pytest.raises(LookupError, match="late"):
        _move_endless(10, on_event=on_event)


def test_callback_blocks():
    """While ``on_event`` blocks, the run goes on sending and deleting.

    A callback that prints blocks after Ctrl-S on its terminal.
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
    assert running.is_alive(), "all messages are moved, and the run waits for the callback"
    let_go.set()
    running.join(60)
    ((report, _queue),) = queues
    assert (report.ended, report.sent, report.deleted) == (Ended.DONE, 500, 500)


def test_many_threads():
    """With 16 threads, a run does not take deletes that are still under way for failed deletes.

    At any time, more than 100 messages are sent and not yet deleted.
    """
    report, queue, _ = _move_endless(3_000, latency=0.002)
    assert (report.ended, report.sent, report.deleted) == (Ended.DONE, 3_000, 3_000)
    assert sum(queue.calls.values()) <= 0.3 * 3_000 + 20


def test_progress_of_delete(world):
    """With ``delete``, the progress counts messages that are deleted without being sent."""
    expired = [task(expires=iso_time(world.clock() - 1)) for _ in range(10)]
    world.fill(*expired, *bodies(20))
    world.redrive(delete=True, dump="d")
    last = [event for event in world.events if isinstance(event, Progress)][-1]
    assert (last.sent, last.dropped, last.to_send) == (0, 30, 30)
    assert progress._facts(last).startswith("30/30 ")


@pytest.mark.parametrize("options", [{"limit": 1}, {}], ids=["limit", "all"])
def test_slow_run_ends(world, options):
    """A run with a low rate ends as soon as it has sent its last message.

    At a rate of one message per hour, it does not wait for another hour.
    """
    world.fill("m", *bodies(2 if options else 0))
    began = world.clock()
    assert world.redrive(rate="1/h", **options).sent == 1
    assert world.clock() - began < 60


def test_rate_with_slow_calls(tmp_path):
    """A run sends 20 messages per second, as asked, although a call takes a quarter of a second."""
    world = World(tmp_path, latency=0.25, threads=None)
    world.fill(*bodies(400))
    began = world.clock.now
    report = world.redrive(rate="20/s")
    assert report.sent == 400
    assert world.clock.now - began < 1.4 * 400 / 20


@pytest.mark.parametrize(("seconds", "in_doubt"), [(200, 0), (1_000, 1)])
def test_fifo_doubt(tmp_path, seconds, in_doubt):
    """Within five minutes, a message in doubt can be sent to a FIFO queue again without a copy.

    After five minutes, SQS has forgotten the deduplication ID, and the queue has two copies.
    """
    world = World(tmp_path, fifo=True)
    world.fill("m", MessageGroupId="g", MessageDeduplicationId="d")
    world.dies_at = (4, True)  # after the send, which follows the count, receive and journal
    with pytest.raises(Killed):
        world.redrive()
    world.dies_at = None
    world.clock.now += seconds
    report = world.redrive(include_unknown=True)
    assert (report.sent, report.in_doubt) == (1, in_doubt)
    assert world.bodies(world.main) == {"m": 1 + in_doubt}


def test_deletes_in_doubt(world):
    """If the answers to deletes are lost, the run still knows how many messages remain.

    SQS has deleted the ten messages that the run has sent. The run never received the ten others.
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
    """If SQS refuses a message of a FIFO group, the run sends no later message of the group.

    This also holds if the run receives the later messages again, such as after a suspend.
    """
    world = World(tmp_path, fifo=True)
    fill_one_group(world, 15)

    def refused_and_suspended(event):
        if isinstance(event, MessagesSent) and len(ids(world, MessagesSent)) == 8:
            world.sqs.faults.append(Fault(SEND, "InvalidMessageContents"))
        elif isinstance(event, Failed):
            world.clock.now += 400

    world.on_event = refused_and_suspended
    report = world.redrive()
    assert report.sent == 8, "the messages after the refused one stay"


def test_network_drop_before_deletes(world):
    """At its end, a run without a network tries to delete one batch, and not each batch."""
    world.fill(*bodies(50))
    always(world, DELETE, ConnectTimeoutError(endpoint_url="x"))
    report = world.redrive()
    assert (report.sent, report.deleted, report.not_deleted) == (50, 0, 50)
    # While it receives, the run tries each of the five batches.
    assert world.calls["delete_message_batch"] == (5 + 1) * TRIES


def test_denied_delete_without_send(world):
    """With ``delete``, the report of a denied delete does not mention sent messages."""
    world.fill(*bodies(3))
    always(world, DELETE, "AccessDenied")
    report = world.redrive(delete=True, dump="not written here")
    assert (report.ended, report.failed, report.sent) == (Ended.UNREACHABLE, 3, 0)
    assert report.detail.startswith("DeleteMessageBatch: AccessDenied. ")
    assert "sent" not in report.detail


def proxy_refuses(world):
    """Let a send of the message ``big``, or of more than two messages, fail with HTTP 413."""

    def send(**request):
        if len(request["Entries"]) > 2 or "big" in str(request["Entries"]):
            world.sqs.faults.append(Fault(SEND, TOO_LARGE))
        return send_message_batch(**request)

    send_message_batch, world.sqs.send_message_batch = world.sqs.send_message_batch, send


TOO_LARGE = ClientError(
    {"Error": {"Code": "413", "Message": ""}, "ResponseMetadata": {"HTTPStatusCode": 413}}, SEND
)


def test_batch_too_big_for_proxy(world):
    """If a batch is too big for a proxy before SQS, the run sends its messages one by one."""
    world.fill("big", *bodies(9))
    proxy_refuses(world)
    report = world.redrive()
    assert (report.ended, report.sent, report.failed) == (Ended.DONE, 9, 1)
    assert {event.reason for event in world.events if isinstance(event, Failed)} == {"413"}


@pytest.mark.parametrize(("seconds", "is_hold"), [(10, True), (20, False)])
def test_late_renewal(seconds, is_hold):
    """The run keeps a message hidden by renewals. If one may be too late, it sends nothing.

    SQS confirms a late renewal too. But another run may have received the message by then.
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
        assert sweep.patient_until > clock.now + 10, "the late renewal may hide it from this run"


def test_killed_between_batches(world):
    """A run waits for messages that a killed run still hides, even if none is in doubt."""
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
    assert 0 < wait.seconds < 31, "a receive hides a message for 30 seconds"


def test_not_given_back(world):
    """A look reports how many messages it could not show again, because SQS denied the calls."""
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
