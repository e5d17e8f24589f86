"""The ledger of a redrive: who owns a message, what is in doubt, and what the journal keeps."""

import random

from celery_sqs_backoff.redrive.events import InDoubt
from celery_sqs_backoff.redrive.files import Journal, NoJournal
from celery_sqs_backoff.redrive.ledger import Ledger, RowState
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


def test_a_message_goes_from_held_to_deleted():
    bench = Bench("a")
    bench.ledger.mark_sent(bench.send("a"), "mail")
    bench.delete("a")
    assert bench.written == [("sending", "a"), ("sent", "a"), ("deleted", "a")]
    numbers = bench.ledger.numbers()
    assert (numbers["sent"], numbers["deleted"], numbers["looked_at"]) == (1, 1, 1)
    assert not bench.ledger.rows


def test_the_newest_receive_owns_the_message():
    """The first receive has lapsed. Its thread must not send."""
    bench = Bench("a")
    newest = bench.receive("a", 2, NOW + 60)[0]
    assert bench.ledger.still_ours([bench.messages["a"]]) == []
    assert bench.ledger.still_ours([newest]) == [newest]
    assert bench.ledger.looked_at == 1


def test_who_receives_a_message_again_goes_on_with_it_unless_it_is_being_sent():
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


def test_a_message_whose_hold_was_over_when_it_was_deleted_is_in_doubt():
    bench = Bench("a", "b", "c")
    bench.ledger.mark_sent(bench.send("a", "b"), "mail")
    bench.delete("a")
    bench.clock.now = NOW + 30
    bench.delete("b", "c", "gone")
    assert [e.ids for e in bench.events if isinstance(e, InDoubt)] == [("b",)], "c was unsent"
    assert bench.ledger.numbers()["in_doubt"] == 1


def test_a_message_whose_hold_was_over_when_it_was_sent_is_in_doubt():
    """Another run may have sent it, too, whether SQS confirms our delete or not."""
    bench = Bench("a", "b")
    sending = bench.send("a")
    bench.clock.now = NOW + 30
    bench.ledger.mark_sent(sending, "mail")
    assert [e.ids for e in bench.events if isinstance(e, InDoubt)] == [("a",)]
    bench.delete("a")
    assert bench.ledger.numbers()["in_doubt"] == 1, "named and counted once"


def test_two_threads_that_delete_one_message_count_it_once():
    bench = Bench("a")
    bench.ledger.mark_sent(bench.send("a"), "mail")
    bench.delete("a")
    bench.delete("a")
    assert (bench.ledger.deleted, bench.ledger.dropped) == (1, 0)


def test_a_hold_is_over_a_little_before_its_time():
    bench = Bench("a")
    bench.clock.now = NOW + 27.9
    assert bench.ledger.still_ours([bench.messages["a"]])
    bench.clock.now = NOW + 28.0
    assert not bench.ledger.still_ours([bench.messages["a"]])


def test_a_message_that_was_sent_and_is_received_again_is_only_deleted():
    bench = Bench("a")
    bench.ledger.mark_sent(bench.send("a"), "mail")
    assert bench.receive("a", 2)[1:] == (False, True)
    assert bench.ledger.undeleted == {"a": "a#2"}
    bench.delete("a")
    bench.written.clear()
    assert bench.receive("a", 3)[1:] == (False, True), "SQS has not done the delete"
    assert bench.written == [("sent", "a")], "the next run must know it, too"
    bench.delete("a")
    numbers = bench.ledger.numbers()
    assert (numbers["sent"], numbers["deleted"], numbers["looked_at"]) == (1, 1, 1)


def test_a_message_that_an_earlier_process_has_sent_is_only_deleted():
    bench = Bench(past={"a": None})
    assert bench.ledger.undeleted == {}, "it was not received yet"
    assert bench.receive("a", 1)[1:] == (False, True)
    assert bench.ledger.undeleted == {"a": "a#1"}
    assert bench.ledger.sent == 0


def test_a_message_that_is_lost_is_received_again():
    bench = Bench("a")
    assert bench.ledger.release([bench.messages["a"]]) == ["a#1"]
    assert bench.ledger.looked_at == 0
    assert bench.receive("a", 2)[1]
    assert bench.ledger.looked_at == 1


def test_a_send_without_a_response_when_a_run_is_interrupted_is_in_doubt():
    bench = Bench("a", "b")
    bench.send("a")
    bench.ledger.name_unanswered()
    assert [e.ids for e in bench.events if isinstance(e, InDoubt)] == [("a",)]
    assert bench.ledger.numbers()["in_doubt"] == 1


def test_doubt_counts_messages_not_attempts_and_outlives_a_loss():
    bench = Bench("a")
    for _ in range(3):
        bench.ledger.mark_in_doubt(bench.send("a"), 5.0, resend=True)
    assert bench.ledger.numbers()["in_doubt"] == 1
    bench.ledger.release([bench.messages["a"]])
    bench.messages["a"] = bench.receive("a", 2)[0]
    bench.ledger.mark_unsent(bench.send("a"))
    assert ("unsent", "a") not in bench.written, "an earlier try may have arrived"
    assert bench.ledger.find_doubt(bench.messages["a"]) == 5.0


def test_what_an_earlier_run_left_in_doubt_and_is_gone_does_not_stay_in_doubt():
    bench = Bench("b", past={"a": 1.0, "b": 1.0, "late": 9.0, "c": None})
    assert bench.ledger.numbers()["in_doubt"] == 3
    bench.ledger.forget_past(before=5.0)
    assert bench.written == [("gone", "a", "c")], "late may turn up yet"
    assert bench.ledger.numbers()["in_doubt"] == 1


def test_what_comes_back_takes_no_place():
    bench = Bench("a", "b")
    bench.ledger.leave([(bench.messages["b"], Action.CAME_BACK, "came back")])
    assert (bench.ledger.looked_at, bench.ledger.places) == (2, 1)
    numbers = bench.ledger.numbers()
    assert (numbers["poison"], numbers["returned"]) == (1, 1)


def test_claims_are_no_more_than_the_places_that_are_left():
    bench = Bench("a")
    assert [bench.ledger.claim(10, 14) for _ in range(3)] == [10, 3, None]
    bench.ledger.enter(10, [], NOW)
    assert bench.ledger.claim(10, 14) == 10


def test_messages_are_renewed_shortly_before_their_time_and_not_after_it():
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


def test_all_is_given_back_but_what_was_sent():
    bench = Bench("a", "b", "c")
    bench.ledger.leave([(bench.messages["a"], Action.SKIP, "x")])
    bench.ledger.mark_sent(bench.send("b"), "mail")
    assert sorted(bench.ledger.give_all_back()) == ["a#1", "c#1"]
    assert bench.ledger.give_all_back() == []


def test_the_journal_knows_what_the_ledger_knew(tmp_path):
    """Random histories: what a killed process leaves on the disk is what was so."""
    rng = random.Random(5)
    for number in range(60):
        path = tmp_path / str(number)
        with Journal(path, source="q") as journal:
            bench = Bench(*(f"m{n}" for n in range(8)))
            bench.ledger._journal = journal
            for id_ in bench.messages:
                for _ in range(rng.randrange(3)):
                    messages = bench.send(id_)
                    match rng.randrange(3):
                        case 0:
                            bench.ledger.mark_unsent(messages)
                        case 1:
                            bench.ledger.mark_in_doubt(messages, 1.0, resend=True)
                        case 2:
                            bench.ledger.mark_sent(messages, "mail")
                            if rng.random() < 0.5:
                                bench.delete(id_)
                            break
        with Journal(path, source="q") as journal:
            rows = bench.ledger.rows.items()
            sent = {id_ for id_, row in rows if row.state is RowState.SENT}
            doubted = {id_ for id_, row in rows if row.doubted_at is not None} - sent
            assert {id_ for id_, at in journal.past.items() if at is None} == sent
            assert {id_ for id_, at in journal.past.items() if at is not None} == doubted
