"""What a replay keeps of a dead letter, and what it adds."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_sqs_backoff.redrive.message import DlqMessage
from celery_sqs_backoff.redrive.options import RedriveOptions
from celery_sqs_backoff.sqs.dead_letter import (
    ATTRIBUTE_NAME,
    REPLAY_ATTRIBUTE,
    DeadLetterRecord,
    batches,
    entry_bytes,
    with_record,
)
from celery_sqs_backoff.sqs.envelope import read_envelope
from celery_sqs_backoff.sqs.limits import MAX_MESSAGE_BYTES

TEXT = {"DataType": "String", "StringValue": "x"}
OWN = {
    "text": TEXT,
    "number": {"DataType": "Number.int", "StringValue": "12"},
    "raw": {"DataType": "Binary.gzip", "BinaryValue": b"\0\xff"},
}
TEN = {f"a{i}": TEXT for i in range(9)} | {"raw": OWN["raw"]}


def body(**headers):
    return json.dumps(
        {
            "body": "W1tdLHt9LHt9XQ==",
            "content-type": "application/json",
            "headers": {"task": "mails.send", "id": "42", **headers},
        }
    )


def letter(attributes=None, *, text=None, **system):
    return DlqMessage(
        {
            "MessageId": "m1",
            "ReceiptHandle": "h",
            "Body": body() if text is None else text,
            "MessageAttributes": attributes or {},
            "Attributes": system,
        }
    )


def dead(attributes, text=None, **facts):
    """A letter that our worker has dead-lettered."""
    record = DeadLetterRecord(
        **{
            "task": "mails.send",
            "id": "42",
            "reason": "retry_for is over",
            "outcome": "RETRYABLE",
            "exception_type": "requests.ConnectionError",
            "exception_message": "refused",
            "attempts": 7,
            "first_received_at": 1.0,
            "failed_at": 2.0,
            "origin": "arn:aws:sqs:eu-west-1:1:mails",
            "worker": "celery@host",
        }
        | facts
    )
    text = body() if text is None else text
    return letter(with_record(text, attributes, record), text=text)


def entry(found, **options):
    return found.entry(**{"run_id": "r1", "now": 100.0, **options})


def replays(attributes):
    return json.loads(attributes[REPLAY_ATTRIBUTE]["StringValue"])


def test_body_and_attributes():
    """A replay keeps the body and attributes of all types."""
    sent = entry(dead(OWN))
    assert sent["MessageBody"] == body()
    kept = {k: v for k, v in sent["MessageAttributes"].items() if k != REPLAY_ATTRIBUTE}
    assert kept == OWN


def test_record_is_removed():
    """A replay does not carry the dead-letter record of the attempt before."""
    assert ATTRIBUTE_NAME not in entry(dead(OWN))["MessageAttributes"]


def test_replay_counter():
    """The replay counter survives the next dead-lettering by a worker."""
    attributes = OWN
    for number in (1, 2, 3):
        sent = entry(dead(attributes))["MessageAttributes"]
        assert replays(sent) == {"replays": number, "run": "r1"}
        attributes = sent
    assert dead(attributes).replays == 3


def test_replay_counter_after_sqs_move():
    """The replay counter survives when SQS moves the message itself."""
    sent = entry(letter(OWN))["MessageAttributes"]
    assert letter(sent).replays == 1


@pytest.mark.parametrize("text", [None, "hello"], ids=["celery", "other"])
def test_ten_attributes(text):
    """A message with ten attributes comes back whole and without a counter.

    SQS takes ten attributes.
    """
    sent = entry(letter(TEN, text=text))
    assert (sent["MessageBody"], sent["MessageAttributes"]) == (text or body(), TEN)


NONSENSE = {
    "empty": "",
    "no JSON": "x",
    "no object": "[]",
    "null": '{"replays": null}',
    "no replays": '{"run": 1}',
    "1e999": '{"replays":1e999,"run":"a"}',
    "negative": '{"replays":-99}',
    "huge": f'{{"replays":{"9" * 4000}}}',
}


@pytest.mark.parametrize("text", NONSENSE.values(), ids=NONSENSE)
def test_invalid_counter(text):
    """An invalid replay counter counts as zero."""
    attribute = {"DataType": "String", "StringValue": text}
    assert letter({REPLAY_ATTRIBUTE: attribute}).replays == 0


def test_trace_header():
    """A replay keeps the trace header."""
    sent = entry(letter(AWSTraceHeader="Root=1-2-3"))
    assert sent["MessageSystemAttributes"]["AWSTraceHeader"]["StringValue"] == "Root=1-2-3"


def test_extend_expired():
    """With ``extend``, an expired task gets its original lifetime again.

    It was sent at 1970-01-01 00:00:10, and expired two hours later.
    """
    found = letter(text=body(expires="1970-01-01T02:00:10+00:00"), SentTimestamp="10000")
    assert found.is_expired(7_210.0)
    assert not found.is_expired(7_209.0)
    sent = entry(found, now=50_000.0, extend=True)
    assert read_envelope(sent["MessageBody"]).expires == 50_000 + 7_200
    assert entry(found, now=50_000.0)["MessageBody"] == found.body


def test_age_of_given_up_task():
    """The age of a task that a worker gave up counts from its first receive.

    Given up after 36 h of retries it was "under 1 h" old, and ``--newer 1h`` sent it.
    """
    attributes = dead({}, first_received_at=1_000.0).message["MessageAttributes"]
    given_up = letter(attributes, SentTimestamp="130600000")
    now = 130_700.0
    assert given_up.sent_at == 130_600  # from when on SQS keeps it
    assert RedriveOptions(older="36h").matches(given_up, now)
    assert not RedriveOptions(newer="1h").matches(given_up, now)
    moved = letter(attributes, SentTimestamp="130600000", DeadLetterQueueSourceArn="arn")
    assert RedriveOptions(newer="1h").matches(moved, now)  # by SQS: its record is nobody's


def test_extend_given_up():
    """With ``extend``, an expired task that a worker gave up gets its first lifetime again.

    It had two days at first, of which a worker tried for the first one and a half.
    """
    text = body(expires="1970-01-03T00:00:10+00:00")
    attributes = dead({}, first_received_at=10.0).message["MessageAttributes"]
    found = letter(attributes, text=text, SentTimestamp="129610000")
    sent = entry(found, now=200_000.0, extend=True)
    assert read_envelope(sent["MessageBody"]).expires == 200_000 + 172_800


@pytest.mark.parametrize("first_received_at", [-1e308, 0.0, 1e308])
def test_forged_first_receive(first_received_at):
    """A forged first receive makes a message at most two weeks older.

    It had an age of 311 characters, matched any ``--older``, and could not be extended.
    """
    sent_at, now = 1_700_000_000, 1_700_000_600.0
    attributes = dead({}, first_received_at=first_received_at).message["MessageAttributes"]
    text = body(expires="2023-11-14T22:13:30+00:00")  # ten seconds after it was sent
    found = letter(attributes, text=text, SentTimestamp=str(sent_at * 1_000))
    assert sent_at - 14 * 86_400 <= found.first_sent_at <= sent_at
    assert not RedriveOptions(older="15d").matches(found, now)
    sent = entry(found, now=now, extend=True)
    assert read_envelope(sent["MessageBody"]).expires <= now + 14 * 86_400 + 10
    unknown = letter(attributes, text=text)
    assert unknown.first_sent_at is None
    assert entry(unknown, now=now, extend=True)


def test_parked():
    """A parked message waits for the rest of its backoff."""
    assert dead({}, due_at=160.0, reason="parked").due_in(100.0) == 60
    assert dead({}, due_at=160.0, reason="parked").due_in(200.0) == 0
    assert letter().due_in(0.0) == 0


# Selection


@pytest.mark.parametrize(
    ("selection", "matches"),
    [
        ({}, True),
        ({"task": "mails.*"}, True),
        ({"task": "sms.*"}, False),
        ({"reason": "retry_for*"}, True),
        ({"reason": "parked"}, False),
        ({"error": "requests.*"}, True),
        ({"error": "*refused"}, True),
        ({"error": "*timeout*"}, False),
        ({"ids": ["42"]}, True),
        ({"ids": ["m1"]}, True),
        ({"ids": ["other"]}, False),
        ({"task": "mails.*", "reason": "parked"}, False),
        ({"older": "1h"}, False),  # no SentTimestamp
    ],
)
def test_selection(selection, matches):
    """Every option of a selection must match the message."""
    assert RedriveOptions(**selection).matches(dead({}), 100.0) is matches


@pytest.mark.parametrize(
    ("selection", "matches"),
    [
        ({"older": "1h"}, True),
        ({"older": "3h"}, False),
        ({"newer": "3h"}, True),
        ({"newer": "1h"}, False),
        ({"older": "1h", "newer": "3h"}, True),
    ],
)
def test_age(selection, matches):
    """``older`` and ``newer`` count from the time when the message was sent."""
    assert RedriveOptions(**selection).matches(letter(SentTimestamp="0"), 7_200.0) is matches


@pytest.mark.parametrize(("ids", "error"), [([], ValueError), ("42", TypeError)])
def test_no_ids(ids, error):
    """An empty list of ids is an error, and does not select all messages."""
    with pytest.raises(error, match="ids"):
        RedriveOptions(ids=ids)


# Packing


def sized(id_, size, group=None):
    found = letter(text="b" * size, **({"MessageGroupId": group} if group else {}))
    found.id = id_
    return found, {"MessageBody": found.body}


def test_batches_of_ten():
    """A batch holds at most ten entries."""
    found = list(batches([sized(str(i), 1) for i in range(25)], size=10))
    assert [len(batch) for batch in found] == [10, 10, 5]


def test_batches_of_one_mebibyte():
    """A batch holds at most one MiB.

    Ten messages of 256 KiB do not fit in one call. Other tools end with an error here.
    """
    found = list(batches([sized(str(i), 256 * 1024) for i in range(10)], size=10))
    assert [len(batch) for batch in found] == [4, 4, 2]
    full = list(batches([sized("1", MAX_MESSAGE_BYTES), sized("2", 1)], size=10))
    assert [len(batch) for batch in full] == [1, 1]


def test_full_size_message():
    """A message of one MiB is replayed without a counter."""
    text = "b" * (MAX_MESSAGE_BYTES - 10)
    sent = entry(letter(text=text))
    assert entry_bytes(sent) <= MAX_MESSAGE_BYTES
    assert sent["MessageBody"] == text


def test_record_of_sender():
    """A redrive ignores a record on a message that SQS itself moved.

    Then the sender wrote the record, so that a redrive believes it.
    """
    forged = json.dumps({"reason": "parked", "outcome": "RETRYABLE", "due_at": 9e99, "origin": "x"})
    found = letter(
        {ATTRIBUTE_NAME: {"DataType": "String", "StringValue": forged}},
        DeadLetterQueueSourceArn="arn:aws:sqs:eu-west-1:1:mail",
    )
    assert (found.reason, found.outcome, found.due_in(0.0)) == (None, None, 0.0)
    assert found.origin == "arn:aws:sqs:eu-west-1:1:mail"
    assert ATTRIBUTE_NAME not in entry(found)["MessageAttributes"]


@given(
    st.dictionaries(
        st.sampled_from([ATTRIBUTE_NAME, REPLAY_ATTRIBUTE, "own"]),
        st.fixed_dictionaries({"DataType": st.text(max_size=9), "StringValue": st.text()}),
    ),
    st.text(max_size=200),
    st.dictionaries(st.sampled_from(["SentTimestamp", "MessageGroupId"]), st.text(max_size=9)),
)
def test_reading_never_raises(attributes, text, system):
    """Reading a message never raises, whatever it contains."""
    found = letter(attributes, text=text, **system)
    assert RedriveOptions(task="*").matches(found, 0.0) in (True, False)
    if found.unreadable is None:
        entry(found)
