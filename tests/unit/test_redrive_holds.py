"""Messages that are held: renewed in time, never sent when their time may be over, given back."""

from types import SimpleNamespace

import pytest

from celery_sqs_backoff.redrive.holds import Holds
from celery_sqs_backoff.redrive.letter import Letter

SECONDS = 30


class Sqs:
    """Notes each change of visibility; fails those of chosen handles."""

    def __init__(self):
        self.changes, self.failing = [], set()

    def change_message_visibility_batch(self, *, QueueUrl, Entries):  # noqa: N803
        assert 1 <= len(Entries) <= 10
        self.changes += [(e["ReceiptHandle"], e["VisibilityTimeout"]) for e in Entries]
        failed = [{"Id": e["Id"]} for e in Entries if e["ReceiptHandle"] in self.failing]
        return {"Failed": failed}


@pytest.fixture
def sqs():
    return Sqs()


@pytest.fixture
def holds(sqs):
    return Holds(SimpleNamespace(client=sqs, url="u"), SECONDS)


def letters(count, start=0):
    return [
        Letter({"MessageId": f"m{n}", "ReceiptHandle": f"h{n}", "Body": ""})
        for n in range(start, start + count)
    ]


def test_a_message_is_ours_until_shortly_before_its_time_is_over(holds):
    [letter] = letters(1)
    assert not holds.is_ours(letter, 0.0)
    holds.add([letter], 0.0)
    assert holds.is_ours(letter, SECONDS - 2.1)
    assert not holds.is_ours(letter, SECONDS - 1.9)


def test_what_is_half_over_is_renewed_in_tens(holds, sqs):
    found = letters(25)
    holds.add(found, 0.0)
    holds.renew(SECONDS / 2)
    assert sqs.changes == []
    holds.renew(SECONDS / 2 + 1)
    assert sqs.changes == [(letter.handle, SECONDS) for letter in found]
    assert holds.is_ours(found[0], SECONDS + 10.0)


def test_what_sqs_did_not_renew_is_not_ours_when_its_time_is_over(holds, sqs):
    found = letters(2)
    sqs.failing = {"h1"}
    holds.add(found, 0.0)
    holds.renew(20.0)
    assert [holds.is_ours(letter, 35.0) for letter in found] == [True, False]


def test_what_is_over_is_not_renewed_though_sqs_would_agree(holds, sqs):
    """SQS answers 200 to a renewal that comes too late, and hides nothing."""
    found = letters(1)
    holds.add(found, 0.0)
    holds.renew(SECONDS + 1.0)
    assert sqs.changes == []
    assert not holds.is_ours(found[0], SECONDS + 1.0)


def test_what_is_put_aside_is_renewed_seldom_and_given_back_at_the_end(holds, sqs):
    found = letters(12)
    holds.add(found, 0.0)
    holds.put_aside(found)
    holds.renew(20.0)
    assert sqs.changes == [(letter.handle, 600) for letter in found]
    sqs.changes.clear()
    holds.renew(200.0)
    assert sqs.changes == []
    holds.give_all_back()
    assert sqs.changes == [(letter.handle, 0) for letter in found]
    assert not holds.is_aside(found[0])


def test_what_is_deleted_is_neither_renewed_nor_given_back(holds, sqs):
    found = letters(3)
    holds.add(found, 0.0)
    holds.drop(found[:2])
    holds.renew(20.0)
    holds.give_all_back()
    assert sqs.changes == [("h2", SECONDS), ("h2", 0)]


def test_some_can_be_given_back_at_once(holds, sqs):
    found = letters(2)
    holds.add(found, 0.0)
    holds.give_back(found[:1])
    assert sqs.changes == [("h0", 0)]
    assert not holds.is_ours(found[0], 1.0)
    assert holds.is_ours(found[1], 1.0)
