"""A restore puts the messages of an archive back on their dead-letter queue, each once.

A message is in doubt if SQS has not answered its send.
"""

import random
from collections import Counter
from contextlib import nullcontext

import pytest
from botocore.exceptions import ReadTimeoutError

from celery_sqs_backoff.redrive import Ended, RedriveRefused, RedriveUnreachable, api
from celery_sqs_backoff.redrive.events import Finished, InDoubt
from celery_sqs_backoff.redrive.files import Archive, read_archive
from celery_sqs_backoff.redrive.queues import Route
from celery_sqs_backoff.sqs.dead_letter import ATTRIBUTE_NAME
from tests.support.fake_sqs import Fault
from tests.support.redrive_world import Killed, World

SEND = "SendMessageBatch"


def copy_messages(world, path, count, **message):
    """Copy new messages of the dead-letter queue to an archive. Return their bodies."""
    bodies = [f"m{n}" for n in range(count)]
    world.fill(*bodies, **message)
    with Archive(path, source=str(world.source.arn)) as archive:
        world.look(copy=archive)
    return bodies


def archive_messages(world, path, count, **message):
    """Archive messages of the dead-letter queue and delete them there. Return their bodies."""
    bodies = copy_messages(world, path, count, **message)
    world.sqs.queues[world.source.url].messages.clear()
    return bodies


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


@pytest.mark.parametrize("fifo", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_restore_after_kills(tmp_path, seed, fifo):
    """A restore that is killed several times, at any step, still puts each message back once."""
    world, rng = World(tmp_path, fifo=fifo), random.Random(seed)
    group = {"MessageGroupId": "g", "MessageDeduplicationId": "d"} if fifo else {}
    bodies = archive_messages(world, tmp_path / "a", 1 if fifo else 25, **group)
    for _ in range(3):
        world.dies_at = (rng.randint(1, 14), rng.random() < 0.5)
        try:
            world.restore(tmp_path / "a")
        except Killed:
            world.clock.now += 400
    world.dies_at = None
    report = world.restore(tmp_path / "a")
    assert (report.ended, report.in_doubt) == (Ended.DONE, 0)
    assert world.bodies(world.source) == Counter(bodies)


def test_archive_of_copy(world, tmp_path):
    """A restore does not send messages that are on the queue, such as those of a copy."""
    bodies = copy_messages(world, tmp_path / "a", 27)
    del world.sqs.queues[world.source.url].messages[5:12]
    report = world.restore(tmp_path / "a")
    assert (report.ended, report.sent, report.skipped) == (Ended.DONE, 7, 20)
    assert world.bodies(world.source) == Counter(bodies)


def test_hidden_message(world, tmp_path):
    """If another consumer hides a message from the look, the report says that it may be twice."""
    copy_messages(world, tmp_path / "a", 1)
    world.sqs.receive_message(QueueUrl=world.source.url, VisibilityTimeout=600)
    report = world.restore(tmp_path / "a")
    assert (report.ended, report.sent) == (Ended.DONE, 1)
    assert report.detail.startswith("1 messages of the queue are hidden")


def test_missing_journal(world, tmp_path):
    """Without the journal, a second restore finds by their marks the messages put back before."""
    bodies = archive_messages(world, tmp_path / "a", 12)
    world.restore(tmp_path / "a")
    (tmp_path / "a.restored").unlink()
    assert world.restore(tmp_path / "a").skipped == 12
    assert world.bodies(world.source) == Counter(bodies)


@pytest.mark.parametrize("arrives", [False, True])
def test_lost_response(world, tmp_path, arrives):
    """If SQS's answer to a send is lost, the restore looks for the messages on the queue."""
    bodies = archive_messages(world, tmp_path / "a", 12)
    world.sqs.faults.append(Fault(SEND, ReadTimeoutError(endpoint_url="x"), after=arrives))
    report = world.restore(tmp_path / "a")
    assert (report.ended, report.sent) == (Ended.DONE, 12)
    assert world.bodies(world.source) == Counter(bodies)


def test_doubt_remains(world, tmp_path):
    """If another consumer hides a message of the queue, messages in doubt stay in doubt.

    The hidden message may be any of them, so the restore cannot tell which were sent.
    """
    archive_messages(world, tmp_path / "a", 12)
    world.fill("other")
    world.sqs.receive_message(QueueUrl=world.source.url, VisibilityTimeout=600)
    world.sqs.faults.append(Fault(SEND, ReadTimeoutError(endpoint_url="x")))
    report = world.restore(tmp_path / "a")
    assert (report.sent, report.in_doubt) == (2, 10)
    assert [len(e.ids) for e in world.events if isinstance(e, InDoubt)] == [10]
    assert world.restore(tmp_path / "a", include_unknown=True).sent == 10


def test_redrive_between_restores(world, tmp_path):
    """A message that was on the queue is not put back by a later restore, after a redrive."""
    copy_messages(world, tmp_path / "a", 2)
    assert world.restore(tmp_path / "a").skipped == 2
    assert world.redrive(journal=False).sent == 2
    assert world.restore(tmp_path / "a").sent == 0


def test_restore_while_others_arrive(world, tmp_path):
    """A restore sees all messages of the queue, also if new dead letters arrive during its look."""
    copy_messages(world, tmp_path / "a", 30)
    world.arrive(10)
    report = world.restore(tmp_path / "a")
    assert (report.sent, report.skipped, report.detail) == (0, 30, "")


def test_no_response(world, tmp_path):
    """A restore ends if two sends in a row have no response, as a redrive does."""
    archive_messages(world, tmp_path / "a", 50)
    world.sqs.faults += [Fault(SEND, ReadTimeoutError(endpoint_url="x"))] * 5
    report = world.restore(tmp_path / "a")
    assert (report.ended, report.in_doubt) == (Ended.UNREACHABLE, 20)


def test_look_denied(world, tmp_path):
    """If SQS denies a look through the queue, the restore reports why it ended."""
    archive_messages(world, tmp_path / "a", 12)
    world.sqs.faults.append(Fault(SEND, ReadTimeoutError(endpoint_url="x")))

    def deny_second_look():
        if world.calls["send_message_batch"] == 2 and not world.sqs.faults:
            world.sqs.faults.append(Fault("ReceiveMessage", "AccessDenied"))

    world.before_step = deny_second_look
    with pytest.raises(RedriveUnreachable):
        world.restore(tmp_path / "a")
    report = next(event.report for event in world.events if isinstance(event, Finished))
    assert (report.ended, report.sent, report.remaining) == (Ended.UNREACHABLE, 2, 2)


@pytest.mark.parametrize(("looks", "sent", "in_doubt"), [(0, 0, 0), (1, 2, 10)])
def test_stop_during_look(world, tmp_path, looks, sent, in_doubt):
    """A stop also ends a look through the queue. Messages in doubt stay in doubt."""
    archive_messages(world, tmp_path / "a", 12)
    world.fill(*(f"other {n}" for n in range(100)))
    world.sqs.faults.append(Fault(SEND, ReadTimeoutError(endpoint_url="x")))
    before = world.calls["receive_message"] + 13 * looks  # a whole look takes 13 calls

    def stop_in_look():
        if world.calls["receive_message"] == before + 2:
            world.stop.set()

    world.before_step = stop_in_look
    report = world.restore(tmp_path / "a", include_unknown=True)
    assert (report.ended, report.sent, report.in_doubt) == (Ended.INTERRUPTED, sent, in_doubt)
    assert world.calls["receive_message"] <= before + 3


def test_attributes_and_record(world, tmp_path):
    """A restored message keeps its attributes and its record, and gets a mark.

    The mark does not pass on to the message that a redrive sends.
    """
    own = {
        "raw": {"DataType": "Binary", "BinaryValue": b"\0\xff"},
        ATTRIBUTE_NAME: {"DataType": "String", "StringValue": '{"outcome":"UNKNOWN"}'},
    }
    archive_messages(world, tmp_path / "a", 1, MessageAttributes=own)
    [id_] = [message.id for message in read_archive(tmp_path / "a")]
    world.restore(tmp_path / "a")
    (message,) = world.sqs.queues[world.source.url].messages
    restored = {"celery-sqs-backoff-restored": {"DataType": "String", "StringValue": id_}}
    assert message.attributes == own | restored
    world.redrive(include_unknown=True)
    (message,) = world.sqs.queues[world.main.url].messages
    assert message.attributes.keys() == {"raw", "celery-sqs-backoff-replay"}


def test_duplicate_lines(world, tmp_path):
    """If an archive has a message twice, the restore puts it back once."""
    archive_messages(world, tmp_path / "a", 3)
    text = (tmp_path / "a").read_text()
    (tmp_path / "a").write_text(text + text)
    assert world.restore(tmp_path / "a").sent == 3
    assert world.restore(tmp_path / "a").sent == 0


def test_archive_of_other_queue(world, tmp_path, monkeypatch):
    """A restore refuses the archive of another queue, and then creates no journal.

    The journal would block the restore to the right queue.
    """
    archive_messages(world, tmp_path / "a", 3)
    text = (tmp_path / "a").read_text().replace(":mail-dlq", ":sms-dlq")
    (tmp_path / "a").write_text(text)
    route = Route(world.source, (world.main,))
    monkeypatch.setattr(api, "open_route", lambda *args, **options: nullcontext(route))
    with pytest.raises(RedriveRefused, match=r"belongs to arn.*sms-dlq, not to"):
        api.redrive(None, "mail-dlq", restore=tmp_path / "a")
    assert not (tmp_path / "a.restored").exists()


def test_queue_denies_sends(world, tmp_path):
    """If SQS denies sends to the queue, the restore ends. A second restore sends the messages."""
    archive_messages(world, tmp_path / "a", 30)
    world.sqs.faults.append(Fault(SEND, "AccessDenied"))
    report = world.restore(tmp_path / "a")
    assert (report.ended, report.sent, report.in_doubt) == (Ended.UNREACHABLE, 0, 0)
    assert world.restore(tmp_path / "a").sent == 30
