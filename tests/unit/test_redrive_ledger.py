"""The ledger of a redrive knows which thread may send a message, and which messages are in doubt.

A receive hides a message from other consumers for 30 seconds. This time is the hold of the message.
A message is in doubt if another copy of it may have been sent.
"""

from celery_sqs_backoff.redrive.events import InDoubt
from celery_sqs_backoff.redrive.files import NoJournal
from celery_sqs_backoff.redrive.ledger import Ledger
from celery_sqs_backoff.redrive.message import DlqMessage
from celery_sqs_backoff.redrive.triage import Action
from tests.support.fake_sqs import Clock

NOW = 100.0


class Bench:
    """A ledger that has received some messages, each hidden for 30 s."""

    def __init__(self, *ids, past=()):
        self.clock, self.written, self.events = Clock(NOW), [], []
        journal = NoJournal()
        journal.past.update(past)
        journal.write = lambda kind, ids, at=0.0: self.written.append((kind, *ids))
        self.ledger = Ledger(journal, self.events.append, self.clock, 30)
        self.messages = {id_: self.receive(id_, 1)[0] for id_ in ids}

    def receive(self, id_, number, until=NOW + 30):
        """Receive a message. Return it, whether its thread may send it, and whether it was sent."""
        found = DlqMessage({"MessageId": id_, "ReceiptHandle": f"{id_}#{number}", "Body": "b"})
        ours, sent = self.ledger.enter(0, [found], until)
        return found, bool(ours), bool(sent)

    def send(self, *ids):
        messages = [self.messages[id_] for id_ in ids]
        assert self.ledger.start_sending(messages, 1.0) == messages
        return messages

    def delete(self, *ids):
        self.ledger.mark_deleted(ids, name_late=True)


def test_newest_receive():
    """If a message is received twice, only the thread with the newest receive may send it."""
    bench = Bench("a")
    newest = bench.receive("a", 2, NOW + 60)[0]
    assert bench.ledger.still_ours([bench.messages["a"]]) == []
    assert bench.ledger.still_ours([newest]) == [newest]
    assert bench.ledger.looked_at == 1


def test_receive_again():
    """A thread that receives a message again may send it, with two exceptions.

    Another thread is sending the message, or the run has decided not to send it.
    """
    bench = Bench("a")
    bench.messages["a"], is_ours, _ = bench.receive("a", 2)
    assert is_ours
    sending = bench.send("a")
    assert bench.receive("a", 3)[1:] == (False, False), "another thread is sending it"
    bench.ledger.mark_in_doubt(sending, 1.0, resend=True)
    assert sending[0].handle == "a#3", "the sender has taken over the newer handle"
    again, is_ours, _ = bench.receive("a", 4)
    assert is_ours
    bench.ledger.leave([(again, Action.FAIL, "x")])
    assert bench.receive("a", 5)[1:] == (False, False)


def test_late_delete():
    """If a sent message was no longer hidden when it was deleted, it is in doubt.

    Another run may have received it and sent it too.
    """
    bench = Bench("a", "b", "c")
    bench.ledger.mark_sent(bench.send("a", "b"), "mail")
    bench.delete("a")
    bench.clock.now = NOW + 30
    bench.delete("b", "c", "gone")
    assert [e.ids for e in bench.events if isinstance(e, InDoubt)] == [("b",)], "c was not sent"
    assert bench.ledger.numbers()["in_doubt"] == 1


def test_late_send():
    """If a message was no longer hidden when SQS confirmed its send, it is in doubt.

    Another run may have received it and sent it too. A confirmed delete does not end this doubt.
    """
    bench = Bench("a", "b")
    sending = bench.send("a")
    bench.clock.now = NOW + 30
    bench.ledger.mark_sent(sending, "mail")
    assert [e.ids for e in bench.events if isinstance(e, InDoubt)] == [("a",)]
    bench.delete("a")
    assert bench.ledger.numbers()["in_doubt"] == 1, "the message counts once"


def test_two_deletes():
    """If two threads delete the same message, it counts as one."""
    bench = Bench("a")
    bench.ledger.mark_sent(bench.send("a"), "mail")
    bench.delete("a")
    bench.delete("a")
    assert (bench.ledger.deleted, bench.ledger.dropped) == (1, 0)


def test_end_of_hold():
    """The ledger takes a hold of 30 seconds for over after 28, to be on the safe side."""
    bench = Bench("a")
    bench.clock.now = NOW + 27.9
    assert bench.ledger.still_ours([bench.messages["a"]])
    bench.clock.now = NOW + 28.0
    assert not bench.ledger.still_ours([bench.messages["a"]])


def test_doubt_of_message():
    """A message in doubt counts once, however often it is tried, and even after its release."""
    bench = Bench("a")
    for _ in range(3):
        bench.ledger.mark_in_doubt(bench.send("a"), 5.0, resend=True)
    assert bench.ledger.numbers()["in_doubt"] == 1
    bench.ledger.release([bench.messages["a"]])
    bench.messages["a"] = bench.receive("a", 2)[0]
    bench.ledger.mark_unsent(bench.send("a"))
    assert ("unsent", "a") not in bench.written, "an earlier try may have arrived"
    assert bench.ledger.find_doubt(bench.messages["a"]) == 5.0


def test_when_to_renew():
    """The ledger asks for the renewal of a hold shortly before its end, and not after its end."""
    bench = Bench("a", "b")
    bench.receive("a", 2, NOW + 5)
    assert bench.ledger.due(15, left=False) == [("a", "a#2")]
    bench.ledger.renew("a", "a#1", NOW + 90)
    assert bench.ledger.due(15, left=False) == [("a", "a#2")], "an old handle renews nothing"
    assert bench.ledger.renew("a", "a#2", NOW + 90)
    assert bench.ledger.due(15, left=False) == []
    bench.clock.now = NOW + 20
    assert bench.ledger.due(15, left=False) == [("b", "b#1")]
    bench.clock.now = NOW + 31
    assert bench.ledger.due(15, left=False) == [], "SQS would confirm the renewal but hide nothing"
    assert not bench.ledger.renew("b", "b#1", NOW + 90)
