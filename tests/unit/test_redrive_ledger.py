"""The ledger of a redrive: who owns a message, what is in doubt, and what the journal keeps."""

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
        """Returns the message, whether it is ours to settle, and whether it was sent before."""
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
    """The newest receive owns the message.

    The first receive has lapsed, so its thread must not send.
    """
    bench = Bench("a")
    newest = bench.receive("a", 2, NOW + 60)[0]
    assert bench.ledger.still_ours([bench.messages["a"]]) == []
    assert bench.ledger.still_ours([newest]) == [newest]
    assert bench.ledger.looked_at == 1


def test_receive_again():
    """A thread that receives a message again owns it, unless another thread is sending it."""
    bench = Bench("a")
    bench.messages["a"], is_ours, _ = bench.receive("a", 2)
    assert is_ours
    sending = bench.send("a")
    assert bench.receive("a", 3)[1:] == (False, False), "its sender is in charge"
    bench.ledger.mark_in_doubt(sending, 1.0, resend=True)
    assert sending[0].handle == "a#3", "the sender has taken over the newer handle"
    again, is_ours, _ = bench.receive("a", 4)
    assert is_ours
    bench.ledger.leave([(again, Action.FAIL, "x")])
    assert bench.receive("a", 5)[1:] == (False, False)


def test_late_delete():
    """A sent message whose hold was over when it was deleted is in doubt."""
    bench = Bench("a", "b", "c")
    bench.ledger.mark_sent(bench.send("a", "b"), "mail")
    bench.delete("a")
    bench.clock.now = NOW + 30
    bench.delete("b", "c", "gone")
    assert [e.ids for e in bench.events if isinstance(e, InDoubt)] == [("b",)], "c was unsent"
    assert bench.ledger.numbers()["in_doubt"] == 1


def test_late_send():
    """A message whose hold was over when it was sent is in doubt.

    Another run may have sent it, too, whether SQS confirms this run's delete or not.
    """
    bench = Bench("a", "b")
    sending = bench.send("a")
    bench.clock.now = NOW + 30
    bench.ledger.mark_sent(sending, "mail")
    assert [e.ids for e in bench.events if isinstance(e, InDoubt)] == [("a",)]
    bench.delete("a")
    assert bench.ledger.numbers()["in_doubt"] == 1, "named and counted once"


def test_two_deletes():
    """Two threads that delete one message count it once."""
    bench = Bench("a")
    bench.ledger.mark_sent(bench.send("a"), "mail")
    bench.delete("a")
    bench.delete("a")
    assert (bench.ledger.deleted, bench.ledger.dropped) == (1, 0)


def test_end_of_hold():
    """A hold ends a little before its time, by two of 30 seconds."""
    bench = Bench("a")
    bench.clock.now = NOW + 27.9
    assert bench.ledger.still_ours([bench.messages["a"]])
    bench.clock.now = NOW + 28.0
    assert not bench.ledger.still_ours([bench.messages["a"]])


def test_doubt_of_a_message():
    """The doubt counts messages, not attempts, and outlives the loss of a hold."""
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
    """The ledger renews a message shortly before the end of its hold, and not after it."""
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
    assert bench.ledger.due(15, left=False) == [], "SQS would agree, and hide nothing"
    assert not bench.ledger.renew("b", "b#1", NOW + 90)
