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


def test_a_denied_delete_stops_after_one_batch_and_the_journal_deletes_it_later(world):
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


def test_what_is_sent_and_cannot_be_deleted_is_bounded(world):
    """Deletes that time out: nobody denies them, and nothing is deleted."""
    world.fill(*bodies(1_000))
    world.redrive(limit=10)
    always(world, DELETE, "InternalError")
    report = world.redrive()
    assert report.ended is Ended.UNREACHABLE
    assert report.sent <= 110


# Messages written by strangers


def test_delete_deletes_poison_and_unreadable_ones_and_those_without_a_destination(
    world, monkeypatch
):
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


def test_an_unknown_outcome_is_only_sent_on_request(world):
    """It may have been done already."""
    world.fill("a", MessageAttributes={ATTRIBUTE_NAME: text('{"outcome":"UNKNOWN"}')})
    world.fill("b", MessageAttributes={ATTRIBUTE_NAME: text('{"outcome":"RETRYABLE"}')})
    report = world.redrive()
    assert (report.sent, report.skipped, report.unknown) == (1, 1, 1)
    assert world.redrive(include_unknown=True, outcome="unknown").sent == 1


# Ending


def test_what_somebody_else_hides_is_not_done(world):
    world.fill(*bodies(10))
    world.sqs.receive_message(
        QueueUrl=world.source.url, MaxNumberOfMessages=4, VisibilityTimeout=600
    )
    report = world.redrive()
    assert (report.ended, report.sent, report.remaining) == (Ended.INCOMPLETE, 6, 4)
    assert "4 messages could not be received" in report.detail


def test_a_filter_that_leaves_more_than_sqs_hides_says_so(world, monkeypatch):
    """It blamed somebody else, and another run in some minutes would have ended like this one."""
    monkeypatch.setattr(run_module, "MAX_IN_FLIGHT_MESSAGES", 20)
    world.sqs.queues[world.source.url].max_in_flight = 20
    world.fill(*bodies(30))
    report = world.redrive(task="other.*")
    assert (report.ended, report.skipped) == (Ended.INCOMPLETE, 20)
    assert report.detail.startswith("10 messages could not be received: SQS hides at most 20")
    assert "somebody else" not in report.detail


def test_a_fifo_filter_behind_a_message_that_is_left_is_not_done(tmp_path):
    world = World(tmp_path, fifo=True)
    for n in range(12):
        world.fill(f"{n}", MessageGroupId="g", MessageDeduplicationId=f"{n}")
    wanted = [m.id for m in world.sqs.queues[world.source.url].messages if m.body != "3"]
    report = world.redrive(ids=wanted)
    assert (report.ended, report.skipped) == (Ended.INCOMPLETE, 1)
    assert "behind a message of their group that was left" in report.detail
    assert "Wait" not in report.detail, "another run would end like this one"


def test_what_a_killed_run_left_in_doubt_is_settled_when_it_is_gone(world):
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


def test_what_was_sent_is_not_forgotten_because_sqs_counts_too_few(world, monkeypatch):
    """Its counts are approximate: a message that a killed run hides may not be among them."""
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


def test_what_comes_back_is_poison_and_stops_the_run(world):
    """The provider is still down. The run sees its own messages again, and does not loop."""
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


def test_a_filter_that_matches_little_finds_all_and_costs_a_fifth_of_a_call(tmp_path):
    """With 120 ms per call and one worker, which takes minutes: holds must outlast that."""
    world = World(tmp_path, latency=0.12)
    world.fill(*bodies(3_000))
    wanted = [m.id for m in world.sqs.queues[world.source.url].messages[-30:]]
    report = world.redrive(ids=wanted)
    assert (report.ended, report.sent, report.skipped) == (Ended.DONE, 30, 2_970)
    assert sum(world.calls.values()) <= 0.25 * 3_000
    assert len(ids(world, Skipped)) == 2_970
    assert not world.sqs.queues[world.source.url].in_flight(), "all is given back"


@pytest.mark.parametrize("limit", [1, 3])
def test_few_are_sent_of_many_by_a_filter_without_receiving_one_by_one(world, limit):
    """One matching message in a queue of 20,000 took 20,000 calls."""
    world.fill(*bodies(500))
    wanted = [m.id for m in world.sqs.queues[world.source.url].messages[-12:]]
    assert world.redrive(ids=wanted, limit=limit).sent == limit
    assert world.calls["receive_message"] <= 60
    assert not world.sqs.queues[world.source.url].in_flight(), "all is given back"


def test_a_limit_asks_for_no_more_than_it_sends(world):
    world.fill(*bodies(100))
    assert world.redrive(limit=3).sent == 3
    assert world.calls["change_message_visibility_batch"] == 0, "nothing is to be given back"


@pytest.mark.parametrize(("messages", "latency"), [(4_000, 0.15), (1_200, 2.5)])
def test_a_copy_of_a_long_queue_ends_and_is_written_as_it_goes(tmp_path, messages, latency):
    """With one thread the second takes five times as long as a receive hides a message."""
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


def test_throttling_is_waited_for(world):
    world.fill(*bodies(20))
    world.sqs.faults += [Fault(SEND, "ThrottledException")] * 4
    report = world.redrive()
    assert (report.ended, report.sent, report.failed) == (Ended.DONE, 20, 0)


@pytest.mark.parametrize(
    "error",
    [NoCredentialsError(), SSLError(endpoint_url="x", error="y"), ValueError("bug")],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_this_machine_put_nothing_in_doubt_and_end_the_run(world, error):
    world.fill(*bodies(20))
    always(world, SEND, error)
    report = world.redrive()
    assert (report.ended, report.sent, report.remaining) == (Ended.UNREACHABLE, 0, 20)
    if not isinstance(error, SSLError):  # in mid-request, for all that is known
        assert report.in_doubt == 0


def test_nothing_is_sent_if_on_event_raises_at_the_start(world):
    """A batch was: who raises at ``Started``, of too many messages for one, means to end it."""
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
def test_a_journal_on_a_full_disk_ends_the_run_with_what_was_sent_deleted(world, monkeypatch, kind):
    """Whichever line it is that does not fit any more: one of the second batch, or the last."""
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


def test_sends_without_an_answer_do_not_put_the_whole_queue_in_doubt(world):
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
def test_a_message_that_sqs_did_not_delete_is_recognised_by_the_next_run(world, ends):
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


def test_a_callback_that_raises_late_ends_the_run_with_its_error():
    """All was sent and deleted by then, and the run has ended."""

    def on_event(event):
        if isinstance(event, MessagesSent):
            time.sleep(1)
            raise LookupError("late")

    with pytest.raises(LookupError, match="late"):
        _move_endless(10, on_event=on_event)


def test_a_callback_that_blocks_stops_no_call():
    """Ctrl-S on the terminal: nothing was deleted and no hold renewed until Ctrl-Q."""
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


def test_sixteen_threads_do_not_take_each_others_deletes_for_refused():
    """More than a hundred messages are sent and not yet deleted at any time."""
    report, queue, _ = _move_endless(3_000, latency=0.002)
    assert (report.ended, report.sent, report.deleted) == (Ended.DONE, 3_000, 3_000)
    assert sum(queue.calls.values()) <= 0.3 * 3_000 + 20


def test_the_progress_counts_what_is_deleted_unsent(world):
    """The bar of ``--delete`` stood at "0/30 ... 0 s left" to its end."""
    expired = [task(expires=iso_time(world.clock() - 1)) for _ in range(10)]
    world.fill(*expired, *bodies(20))
    world.redrive(delete=True, dump="d")
    last = [event for event in world.events if isinstance(event, Progress)][-1]
    assert (last.sent, last.dropped, last.to_send) == (0, 30, 30)
    assert progress._facts(last).startswith("30/30 ")


@pytest.mark.parametrize("options", [{"limit": 1}, {}], ids=["limit", "all"])
def test_a_slow_run_ends_with_its_last_message(world, options):
    """It waited for the slot of one more: for an hour, at one per hour."""
    world.fill("m", *bodies(2 if options else 0))
    began = world.clock()
    assert world.redrive(rate="1/h", **options).sent == 1
    assert world.clock() - began < 60


def test_slow_calls_do_not_cost_the_rate(tmp_path):
    """From a laptop a call takes a quarter of a second: at 20/s it was 5/s."""
    world = World(tmp_path, latency=0.25, threads=None)
    world.fill(*bodies(400))
    began = world.clock.now
    report = world.redrive(rate="20/s")
    assert report.sent == 400
    assert world.clock.now - began < 1.4 * 400 / 20


@pytest.mark.parametrize(("seconds", "in_doubt"), [(200, 0), (1_000, 1)])
def test_a_fifo_queue_settles_a_doubt_for_five_minutes_only(tmp_path, seconds, in_doubt):
    """Then SQS has forgotten the deduplication id, and the message is there twice."""
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


def test_what_is_left_is_not_taken_for_sent_messages_whose_delete_is_in_doubt(world):
    """SQS has deleted ten and its answers are lost; it counts the ten that nobody has received."""
    world.fill(*bodies(20))
    lost = ReadTimeoutError(endpoint_url="x")
    world.sqs.faults += [Fault(RECEIVE, None, after=True), *[Fault(DELETE, lost, after=True)] * 6]
    report = world.redrive(journal=False)
    assert (report.sent, report.deleted, report.remaining) == (10, 10, 10)
    assert report.ended is Ended.INCOMPLETE


def fill_one_group(world, count):
    for body in bodies(count):
        world.fill(body, MessageGroupId="g", MessageDeduplicationId=body)


def test_a_fifo_group_waits_for_a_message_that_sqs_refused_in_an_earlier_receive(tmp_path):
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


def test_a_denied_delete_of_what_is_only_deleted_does_not_speak_of_what_was_sent(world):
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


def test_a_batch_too_big_for_a_proxy_is_sent_one_by_one(world):
    """HTTP 413 ended the whole run: nothing could be replayed from behind that proxy."""
    world.fill("big", *bodies(9))
    proxy_refuses(world)
    report = world.redrive()
    assert (report.ended, report.sent, report.failed) == (Ended.DONE, 9, 1)
    assert {event.reason for event in world.events if isinstance(event, Failed)} == {"413"}


@pytest.mark.parametrize(("seconds", "is_hold"), [(10, True), (20, False)])
def test_a_renewal_that_may_have_come_too_late_is_no_hold(seconds, is_hold):
    """SQS takes an old handle: two runs had the same message, and each sent it."""
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


def test_a_run_killed_between_two_batches_is_resumed_with_patience(world):
    """Nothing was in doubt, and the messages in its hands were taken for somebody else's."""
    world.fill(*bodies(20))

    def dies():
        if world.calls["receive_message"] == 2:
            world.dies_at = (world.steps, True)

    world.before_step = dies
    with pytest.raises(Killed):
        world.redrive()
    world.before_step, world.dies_at = lambda: None, None
    assert len(world.sqs.queues[world.source.url].in_flight()) == 10
    report = world.redrive()
    assert (report.ended, report.sent, report.remaining) == (Ended.DONE, 10, 0)


def test_a_look_says_what_sqs_has_not_given_back(world):
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
