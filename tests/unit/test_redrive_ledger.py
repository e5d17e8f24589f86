"""The states of a redrive's messages, and the numbers that are folds over them."""

import random
from collections import Counter

import pytest

from celery_sqs_backoff.redrive.ledger import Ledger, Receipt, State, doubt_late, numbers_of
from celery_sqs_backoff.redrive.past import Entry, Past

NOW = 100.0


def ledger(*ids, past=None):
    found = Ledger(past)
    for id_ in ids:
        found.received(id_, f"{id_}#1", NOW + 30)
    return found


def test_a_message_goes_from_seen_to_deleted():
    found = ledger("a")
    assert found.start_sending(["a"], 7.0) == Entry("sending", ("a",), 7.0)
    assert found.has_sent(["a"]) == Entry("sent", ("a",))
    assert found.has_deleted(["a"]) == Entry("deleted", ("a",))
    assert (found.sent, found.deleted, found.looked_at, found.rows) == (1, 1, 1, {})


@pytest.mark.parametrize("state", ["has_sent", "has_come_back_late", "is_in_doubt"])
def test_a_transition_that_cannot_be_is_an_error(state):
    found = ledger("a")
    if state == "has_come_back_late":
        found.start_sending(["a"], 1.0)
        with pytest.raises(ValueError, match="cannot become came back"):
            found.has_come_back(["a"])
        return
    with pytest.raises(ValueError, match="a message that is seen cannot become"):
        getattr(found, state)(["a"])


def test_the_newest_receive_owns_the_message():
    """The first receive has lapsed; whoever still holds its handle must not send."""
    found = ledger("a")
    found.received("a", "a#2", NOW + 60)
    assert not found.owns("a", "a#1", NOW, 2.0)
    assert found.owns("a", "a#2", NOW, 2.0)
    assert not found.release("a", "a#1")
    assert found.looked_at == 1


def test_whoever_receives_a_message_again_goes_on_with_it_unless_it_is_being_sent():
    found = ledger("a")
    assert found.received("a", "a#2", NOW) is Receipt.NEW
    found.start_sending(["a"], 1.0)
    assert found.received("a", "a#3", NOW) is Receipt.KNOWN, "its sender is in charge"
    found.is_in_doubt(["a"])
    assert found.received("a", "a#4", NOW) is Receipt.NEW
    found.put_aside(["a"], "failed")
    assert found.received("a", "a#5", NOW) is Receipt.KNOWN


def test_what_was_sent_and_not_hidden_until_its_delete_is_in_doubt():
    found = ledger("a", "b")
    assert doubt_late(found, ["a"], NOW + 99) == (), "it is deleted unsent"
    found.start_sending(["a", "b"], 1.0)
    found.has_sent(["a", "b"])
    until = found.rows["a"].until
    assert doubt_late(found, ["a", "gone"], until - 1) == ()
    assert doubt_late(found, ["a", "gone"], until) == ("a",)
    assert doubt_late(found, ["a"], until) == (), "named once"
    found.has_deleted(["a", "b"])
    assert found.in_doubt == 1


def test_two_threads_that_delete_one_message_count_it_once():
    found = ledger("a")
    found.start_sending(["a"], 1.0)
    found.has_sent(["a"])
    assert found.has_deleted(["a"]).ids == ("a",)
    assert found.has_deleted(["a"]).ids == ()
    assert (found.deleted, found.dropped) == (1, 0)


def test_a_hold_is_over_a_little_before_its_time():
    found = ledger("a")
    assert found.owns("a", "a#1", NOW + 27.9, 2.0)
    assert not found.owns("a", "a#1", NOW + 28.0, 2.0)


def test_what_was_sent_and_is_received_again_is_only_deleted():
    found = ledger("a")
    found.start_sending(["a"], 1.0)
    found.has_sent(["a"])
    assert found.received("a", "a#2", NOW) is Receipt.SENT_BEFORE
    assert found.undeleted == [("a", "a#2")]
    found.has_deleted(["a"])
    assert found.received("a", "a#3", NOW) is Receipt.SENT_BEFORE, "SQS shows a deleted message"
    assert (found.sent, found.deleted, found.looked_at) == (1, 0, 1)
    found.has_deleted(["a"])
    assert (found.sent, found.deleted, found.looked_at) == (1, 1, 1)


def test_what_an_earlier_process_has_sent_is_only_deleted():
    found = ledger("a", past=Past(sent={"a"}))
    assert found.undeleted == [("a", "a#1")]
    assert found.sent == 0


def test_a_message_that_is_lost_is_received_anew():
    found = ledger("a")
    assert found.release("a", "a#1")
    assert found.looked_at == 0
    assert found.received("a", "a#2", NOW) is Receipt.NEW
    assert found.looked_at == 1


def test_doubt_counts_messages_not_attempts_and_outlives_a_loss():
    found = ledger("a")
    for _ in range(3):
        found.start_sending(["a"], 5.0)
        found.is_in_doubt(["a"])
    assert found.in_doubt == 1
    found.release("a", "a#1")
    found.received("a", "a#2", NOW)
    found.start_sending(["a"], 6.0)
    assert found.was_unsent(["a"]) == Entry("unsent", ()), "an earlier try may have arrived"
    assert found.in_doubt == 1


def test_what_an_earlier_run_left_in_doubt_and_is_gone_does_not_stay_in_doubt():
    past = Past(in_doubt={"a": 1.0, "b": 1.0, "late": 9.0}, sent={"c"}, last_at=1.0)
    found = ledger("b", past=past)
    assert found.in_doubt == 3
    assert found.settle_gone(before=5.0) == Entry("gone", ("a", "c")), "late may turn up yet"
    assert found.in_doubt == 1


def test_what_comes_back_takes_no_place():
    found = ledger("a", "b")
    found.has_come_back(["b"])
    assert (found.looked_at, found.places) == (2, 1)
    numbers = numbers_of(found)
    assert (numbers["poison"], numbers["returned"]) == (1, 1)


def test_messages_are_renewed_shortly_before_their_time_and_not_after_it():
    found = ledger("a", "b")
    found.received("a", "a#2", NOW + 5)
    assert [id_ for id_, _ in found.due(NOW, 15)] == ["a"]
    found.renewed("a", "a#1", NOW + 90)
    assert found.rows["a"].until == NOW + 5, "an old handle renews nothing"
    found.renewed("a", "a#2", NOW + 90)
    assert list(found.due(NOW, 15)) == []
    assert [id_ for id_, _ in found.due(NOW + 20, 15)] == ["b"]
    assert list(found.due(NOW + 31, 15)) == [], "SQS would agree, and hide nothing"


def test_all_is_given_back_but_what_was_sent():
    found = ledger("a", "b", "c")
    found.put_aside(["a"], "skipped")
    found.start_sending(["b"], 1.0)
    found.has_sent(["b"])
    assert sorted(found.give_all_back()) == ["a#1", "c#1"]
    assert found.give_all_back() == []


def test_the_past_is_the_fold_of_the_log():
    """Random histories: what a killed process leaves is what its ledger knew."""
    rng = random.Random(5)
    for _ in range(300):
        live, past = Ledger(), Past()
        past.begin("r")
        for n in range(8):
            id_ = f"m{n}"
            live.received(id_, "h", NOW)
            for _ in range(rng.randrange(3)):
                past.apply(live.start_sending([id_], 1.0))
                match rng.randrange(3):
                    case 0:
                        past.apply(live.was_unsent([id_]))
                    case 1:
                        live.is_in_doubt([id_])
                    case 2:
                        past.apply(live.has_sent([id_]))
                        if rng.random() < 0.5:
                            past.apply(live.has_deleted([id_]))
                        break
        states = live.rows
        assert past.sent == {i for i, row in states.items() if row.state is State.SENT}
        doubted = {i for i, row in states.items() if row.doubted and row.state is not State.SENT}
        assert set(past.in_doubt) == doubted
        assert past.sent_in_run == live.sent
        counted = Counter(row.state for row in states.values())
        counted[State.DELETED] = live.deleted
        assert {s: n for s, n in live.counts.items() if n} == {
            s: n for s, n in counted.items() if n
        }
        assert sum(live.counts.values()) == live.looked_at == 8
