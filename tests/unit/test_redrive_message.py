"""What a redrive reads from a dead letter, and what it keeps in the message that it sends.

The message that it sends is the replay.
"""

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


def letter_of_worker(attributes, text=None, **facts):
    """Return a dead letter as a worker sends it, with its record."""
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
    """A replay has the body and the attributes of the task's message, but not the record."""
    sent = entry(letter_of_worker(OWN))
    assert sent["MessageBody"] == body()
    kept = {k: v for k, v in sent["MessageAttributes"].items() if k != REPLAY_ATTRIBUTE}
    assert kept == OWN


def test_replay_counter():
    """The count of replays goes on if a worker makes the replay a dead letter again."""
    attributes = OWN
    for number in (1, 2, 3):
        sent = entry(letter_of_worker(attributes))["MessageAttributes"]
        assert replays(sent) == {"replays": number, "run": "r1"}
        attributes = sent
    assert letter_of_worker(attributes).replays == 3


def test_replay_counter_after_sqs_move():
    """The count of replays goes on if SQS itself moves the replay to the dead-letter queue."""
    sent = entry(letter(OWN))["MessageAttributes"]
    assert letter(sent).replays == 1


@pytest.mark.parametrize("text", [None, "hello"], ids=["celery", "other"])
def test_ten_attributes(text):
    """The replay of a message with ten attributes has the same ten, and no count of replays.

    SQS allows at most ten attributes.
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
    """An invalid count of replays is read as 0."""
    attribute = {"DataType": "String", "StringValue": text}
    assert letter({REPLAY_ATTRIBUTE: attribute}).replays == 0


def test_trace_header():
    """A replay keeps the trace header of AWS X-Ray."""
    sent = entry(letter(AWSTraceHeader="Root=1-2-3"))
    assert sent["MessageSystemAttributes"]["AWSTraceHeader"]["StringValue"] == "Root=1-2-3"


def test_extend_expired():
    """With ``extend``, the replay of an expired task gets the task's original lifetime again.

    Here the task expired two hours after it was sent.
    """
    found = letter(text=body(expires="1970-01-01T02:00:10+00:00"), SentTimestamp="10000")
    assert found.is_expired(7_210.0)
    assert not found.is_expired(7_209.0)
    sent = entry(found, now=50_000.0, extend=True)
    assert read_envelope(sent["MessageBody"]).expires == 50_000 + 7_200
    assert entry(found, now=50_000.0)["MessageBody"] == found.body


def test_age_of_given_up_task():
    """The age of a task that a worker gave up counts from its first receive.

    The worker sent the dead letter after 36 hours of retries, so SQS counts it as new.
    """
    attributes = letter_of_worker({}, first_received_at=1_000.0).message["MessageAttributes"]
    given_up = letter(attributes, SentTimestamp="130600000")
    now = 130_700.0
    assert given_up.sent_at == 130_600  # when the worker sent the dead letter
    assert RedriveOptions(older="36h").matches(given_up, now)
    assert not RedriveOptions(newer="1h").matches(given_up, now)
    moved = letter(attributes, SentTimestamp="130600000", DeadLetterQueueSourceArn="arn")
    assert RedriveOptions(newer="1h").matches(moved, now)  # SQS moved it, so its record is forged


def test_extend_given_up():
    """With ``extend``, the replay of a task that a worker gave up has the original lifetime again.

    The original lifetime is two days. The worker gave the task up after one and a half.
    """
    text = body(expires="1970-01-03T00:00:10+00:00")
    attributes = letter_of_worker({}, first_received_at=10.0).message["MessageAttributes"]
    found = letter(attributes, text=text, SentTimestamp="129610000")
    sent = entry(found, now=200_000.0, extend=True)
    assert read_envelope(sent["MessageBody"]).expires == 200_000 + 172_800


@pytest.mark.parametrize("first_received_at", [-1e308, 0.0, 1e308])
def test_forged_first_receive(first_received_at):
    """A forged time of the first receive makes a message at most 14 days older.

    SQS keeps no message for longer.
    """
    sent_at, now = 1_700_000_000, 1_700_000_600.0
    attributes = letter_of_worker({}, first_received_at=first_received_at).message[
        "MessageAttributes"
    ]
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
    """The replay of a parked message waits for the rest of its retry delay.

    A worker parks a message on the dead-letter queue if SQS already hides too many others.
    """
    assert letter_of_worker({}, due_at=160.0, reason="parked").due_in(100.0) == 60
    assert letter_of_worker({}, due_at=160.0, reason="parked").due_in(200.0) == 0
    assert letter().due_in(0.0) == 0


# Options that select messages


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
    """A message is selected only if it matches all options."""
    assert RedriveOptions(**selection).matches(letter_of_worker({}), 100.0) is matches


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
    """An empty list of IDs is an error. It does not select all messages."""
    with pytest.raises(error, match="ids"):
        RedriveOptions(ids=ids)


# Batches


def message_of_size(id_, size, group=None):
    found = letter(text="b" * size, **({"MessageGroupId": group} if group else {}))
    found.id = id_
    return found, {"MessageBody": found.body}


def test_batches_of_ten():
    """A batch holds at most ten entries."""
    found = list(batches([message_of_size(str(i), 1) for i in range(25)], size=10))
    assert [len(batch) for batch in found] == [10, 10, 5]


def test_batches_of_one_mebibyte():
    """A batch holds at most 1 MiB, so ten messages of 256 KiB need three batches."""
    found = list(batches([message_of_size(str(i), 256 * 1024) for i in range(10)], size=10))
    assert [len(batch) for batch in found] == [4, 4, 2]
    full = list(
        batches([message_of_size("1", MAX_MESSAGE_BYTES), message_of_size("2", 1)], size=10)
    )
    assert [len(batch) for batch in full] == [1, 1]


def test_full_size_message():
    """The replay of a message of nearly 1 MiB, SQS's maximum, has no count of replays."""
    text = "b" * (MAX_MESSAGE_BYTES - 10)
    sent = entry(letter(text=text))
    assert entry_bytes(sent) <= MAX_MESSAGE_BYTES
    assert sent["MessageBody"] == text


def test_record_of_sender():
    """A redrive ignores the record of a message that SQS itself has moved.

    A worker sends a dead letter with its record as a new message. So this record is forged.
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
