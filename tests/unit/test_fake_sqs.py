"""The strict fake SQS: each rule, with where it is from.

[D] the page of AWS that says so; [R] an answer of AWS recorded in LocalStack's tests
(``@markers.aws.validated`` in tests/aws/services/sqs, at 8b9a79f0); [I] an issue that shows it.

- visibility: https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-visibility-timeout.html
- messages, queues: .../SQSDeveloperGuide/quotas-messages.html, .../quotas-queues.html
- DLQ: .../SQSDeveloperGuide/sqs-dead-letter-queues.html
- FIFO: .../SQSDeveloperGuide/FIFO-queues-understanding-logic.html
- API: .../latest/APIReference/API_<action>.html
"""

import json

import pytest
from botocore.exceptions import ClientError, ReadTimeoutError

from ..support.fake_sqs import Clock, FakeSQS, Fault

HOUR = 3_600


class Bench:
    """A fake SQS, its clock, and one queue with a DLQ."""

    def __init__(self, *, fifo=False, max_in_flight=120_000, **attributes):
        self.clock = Clock()
        self.sqs = FakeSQS(self.clock, max_in_flight=max_in_flight)
        kind = {"FifoQueue": "true", "ContentBasedDeduplication": "true"} if fifo else {}
        end = ".fifo" if fifo else ""
        self.dlq = self.sqs.create_queue(QueueName=f"dlq{end}", Attributes=kind)["QueueUrl"]
        policy = {"deadLetterTargetArn": f"arn:aws:sqs:us-east-1:1:dlq{end}", "maxReceiveCount": 3}
        self.url = self.sqs.create_queue(
            QueueName=f"q{end}",
            Attributes={**kind, "RedrivePolicy": json.dumps(policy), **attributes},
        )["QueueUrl"]
        self.queue = self.sqs.queues[self.url]

    def send(self, body="a", **options):
        return self.sqs.send_message(QueueUrl=self.url, MessageBody=body, **options)["MessageId"]

    def receive(self, url=None, **options):
        options = {"MaxNumberOfMessages": 10, "WaitTimeSeconds": 20, **options}
        answer = self.sqs.receive_message(
            QueueUrl=url or self.url, MessageSystemAttributeNames=["All"], **options
        )
        return answer.get("Messages", [])

    def bodies(self, **options):
        return [message["Body"] for message in self.receive(**options)]

    def hide(self, message, seconds):
        return code(self.sqs.change_message_visibility_batch, self.url, message, seconds)

    def delete(self, message):
        return code(self.sqs.delete_message_batch, self.url, message)


def code(call, url, message, seconds=None):
    """What SQS answers for one entry: an error code, or ``None``."""
    entry = {"Id": "0", "ReceiptHandle": message["ReceiptHandle"]}
    if seconds is not None:
        entry["VisibilityTimeout"] = seconds
    failed = call(QueueUrl=url, Entries=[entry]).get("Failed", [])
    return failed[0]["Code"] if failed else None


def text(value="v"):
    return {"DataType": "String", "StringValue": value}


@pytest.fixture
def bench():
    return Bench()


@pytest.fixture
def fifo():
    return Bench(fifo=True)


# Ranges


def send(**options):
    return lambda bench: bench.send(**{"body": "a", **options})


def receive(**options):
    return lambda bench: bench.receive(**options)


def create(**attributes):
    return lambda bench: bench.sqs.create_queue(QueueName="other", Attributes=attributes)


def redrive_to(dlq, count):
    policy = {"deadLetterTargetArn": f"arn:aws:sqs:us-east-1:1:{dlq}", "maxReceiveCount": count}
    return create(RedrivePolicy=json.dumps(policy))


def batch(*ids, body="a"):
    entries = [{"Id": id_, "MessageBody": body} for id_ in ids]
    return lambda bench: bench.sqs.send_message_batch(QueueUrl=bench.url, Entries=entries)


VALUE, BATCH = "InvalidParameterValue", "AWS.SimpleQueueService."
ROOM = 1_048_576 - len("a" + "String" + "v")

#: [D] API: SendMessage, SendMessageBatch, ReceiveMessage, SetQueueAttributes; messages; DLQ.
REFUSED = {
    "11 attributes": (send(MessageAttributes={f"a{i}": text() for i in range(11)}), VALUE),
    "an empty attribute": (send(MessageAttributes={"a": text("")}), VALUE),
    "two values": (send(MessageAttributes={"a": text() | {"StringListValues": []}}), VALUE),
    "another type": (send(MessageAttributes={"a": text() | {"DataType": "Binary"}}), VALUE),
    "1 MiB with its attributes": (
        send(body="x" * (ROOM + 1), MessageAttributes={"a": text()}),
        VALUE,
    ),
    "no body": (send(body=""), "MissingParameter"),
    "not a character of XML": (send(body="\ufffe"), "InvalidMessageContents"),
    "delay -1": (send(DelaySeconds=-1), VALUE),
    "delay 901": (send(DelaySeconds=901), VALUE),
    "receive 0": (receive(MaxNumberOfMessages=0), VALUE),
    "receive 11": (receive(MaxNumberOfMessages=11), VALUE),
    "wait 21": (receive(WaitTimeSeconds=21), VALUE),
    "hide -1": (receive(VisibilityTimeout=-1), VALUE),
    "hide 43201": (receive(VisibilityTimeout=43_201), VALUE),
    "DLQ of the other type": (redrive_to("dlq.fifo", 3), VALUE),
    "no such DLQ": (redrive_to("none", 3), VALUE),
    "maxReceiveCount 0": (redrive_to("dlq", 0), VALUE),
    "maxReceiveCount 1001": (redrive_to("dlq", 1001), VALUE),
    "visibility timeout 43201": (create(VisibilityTimeout="43201"), "InvalidAttributeValue"),
    "retention 59": (create(MessageRetentionPeriod="59"), "InvalidAttributeValue"),
    "no entries": (batch(), f"{BATCH}EmptyBatchRequest"),
    "11 entries": (batch(*map(str, range(11))), f"{BATCH}TooManyEntriesInBatchRequest"),
    "one ID twice": (batch("1", "1"), f"{BATCH}BatchEntryIdsNotDistinct"),
    "an ID with a space": (batch("a b"), f"{BATCH}InvalidBatchEntryId"),
    "an ID of 81 characters": (batch("x" * 81), f"{BATCH}InvalidBatchEntryId"),
    "a batch of 1 MiB": (batch("1", "2", body="x" * 600_000), f"{BATCH}BatchRequestTooLong"),
    "no such queue": (
        lambda bench: bench.receive("https://sqs.example/1/none"),
        f"{BATCH}NonExistentQueue",
    ),
}

#: [D] API: SendMessage; [R] test_fifo_queue_send_message_with_delay_seconds_fails.
REFUSED_ON_FIFO = {
    "no group": (send(), "MissingParameter"),
    "a delay of its own": (send(MessageGroupId="g", DelaySeconds=1), VALUE),
}


@pytest.mark.parametrize(("call", "error"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(bench, call, error):
    """SQS refuses each call that is out of its ranges, with the error of that case."""
    bench.sqs.create_queue(QueueName="dlq.fifo", Attributes={"FifoQueue": "true"})
    with pytest.raises(ClientError) as refused:
        call(bench)
    assert refused.value.response["Error"]["Code"] == error


@pytest.mark.parametrize(("call", "error"), REFUSED_ON_FIFO.values(), ids=REFUSED_ON_FIFO.keys())
def test_refused_on_fifo(fifo, call, error):
    """A FIFO queue refuses a message without a group, and one with a delay of its own."""
    with pytest.raises(ClientError) as refused:
        call(fifo)
    assert refused.value.response["Error"]["Code"] == error


def test_taken(bench):
    """SQS takes values at the limits of its ranges."""
    bench.send("x" * ROOM, MessageAttributes={"a": text()}, DelaySeconds=900)
    bench.send(MessageAttributes={f"a{i}": text() for i in range(10)}, DelaySeconds=0)
    assert bench.bodies(VisibilityTimeout=43_200) == ["a"]
    bench.clock.now += 900
    assert bench.bodies(VisibilityTimeout=0) == ["x" * ROOM]


# Visibility


def test_hidden_by_receive(bench):
    """A receive hides its message for the queue's visibility timeout.

    [D] visibility: 30 s by default; a new receive counts from anew.
    """
    bench.send()
    [first] = bench.receive()
    bench.clock.now += 29
    assert bench.receive() == []
    bench.clock.now += 1
    [second] = bench.receive()
    counts = [m["Attributes"]["ApproximateReceiveCount"] for m in (first, second)]
    assert counts == ["1", "2"]
    assert first["ReceiptHandle"] != second["ReceiptHandle"]
    firsts = {m["Attributes"]["ApproximateFirstReceiveTimestamp"] for m in (first, second)}
    assert firsts == {"1800000000000"}


def test_change_visibility(bench):
    """A change of the visibility counts from its call, and 0 shows the message at once.

    [D] visibility.
    """
    bench.send()
    [message] = bench.receive()
    bench.clock.now += 20
    bench.hide(message, 30)
    bench.clock.now += 29
    assert bench.receive() == []
    bench.hide(message, 0)
    assert len(bench.receive()) == 1


def test_twelve_hours(bench):
    """SQS counts its 12 hours from the receive.

    [D] visibility: extending does not reset the maximum of 12 hours.
    """
    bench.send()
    [message] = bench.receive()
    assert bench.hide(message, 12 * HOUR) is None  # in the same second
    bench.clock.now += 5 * HOUR
    assert bench.hide(message, 7 * HOUR + 1) == "InvalidParameterValue"
    assert bench.hide(message, 7 * HOUR) is None


@pytest.mark.parametrize("seconds", [-1, 43_201])
def test_range_of_visibility(bench, seconds):
    """SQS refuses a visibility timeout outside 0 to 43,200 s.

    [D] API: ChangeMessageVisibility.
    """
    bench.send()
    [message] = bench.receive()
    assert bench.hide(message, seconds) == "InvalidParameterValue"


# Receipt handles


def test_late_change(bench):
    """SQS confirms a change after the visibility timeout, and does nothing.

    [R] on a standard queue; LocalStack's issue 9632.
    """
    bench.send()
    [message] = bench.receive()
    bench.clock.now += 30
    assert bench.hide(message, 600) is None
    assert not bench.sqs.changes[-1].worked
    assert len(bench.receive()) == 1


def test_change_by_stale_handle(bench):
    """A stale handle changes the visibility of a message that another consumer holds.

    [R] test_terminate_visibility_timeout_after_receive.
    """
    bench.send()
    [stale] = bench.receive()
    bench.clock.now += 30
    bench.receive()
    assert bench.hide(stale, 0) is None
    assert len(bench.receive()) == 1


def test_late_delete(bench):
    """A delete works after the visibility timeout if no other receive came since.

    [D] API: DeleteMessage; [R].
    """
    bench.send()
    [message] = bench.receive()
    bench.clock.now += 30
    assert bench.delete(message) is None
    assert bench.receive() == []
    assert bench.delete(message) is None, "again"


@pytest.mark.parametrize("works", [True, False])
def test_delete_by_stale_handle(bench, works):
    """SQS confirms a delete with a stale handle, and may do nothing.

    [D] API: DeleteMessage, "the message might not be deleted".
    """
    bench.queue.stale_handles_delete = works
    bench.send()
    [stale] = bench.receive()
    bench.clock.now += 30
    bench.receive()
    assert bench.delete(stale) is None
    assert (bench.queue.messages == []) is works


def test_late_calls_on_fifo(fifo):
    """On a FIFO queue a handle ends with its visibility timeout.

    [R 2025-03-28] "The receipt handle has expired"; [I] kombu 1391 for a change.
    """
    fifo.send(MessageGroupId="g")
    [message] = fifo.receive()
    fifo.clock.now += 30
    assert fifo.delete(message) == fifo.hide(message, 5) == "InvalidParameterValue"
    fifo.receive()
    assert fifo.delete(message) == fifo.hide(message, 5) == "InvalidParameterValue"


def test_refused_handles(bench):
    """SQS refuses a handle that is unknown or too old, or whose message is gone.

    [R] for unknown ones and deleted messages; [I] boto3 2898: 12 hours after the receive.
    """
    unknown = {"ReceiptHandle": "x"}
    assert bench.delete(unknown) == bench.hide(unknown, 5) == "ReceiptHandleIsInvalid"
    for _ in range(2):
        bench.send()
    deleted, kept = bench.receive()
    bench.delete(deleted)
    assert bench.hide(deleted, 5) == VALUE
    bench.clock.now += 12 * HOUR + 1
    assert bench.delete(kept) == VALUE


# Quotas


def test_quota_in_flight():
    """At the quota of messages in flight a short poll fails, and a long poll is empty.

    [D] queues: 120,000 by default.
    """
    bench = Bench(max_in_flight=2)
    for body in "abc":
        bench.send(body)
    assert bench.bodies() == ["a", "b"]
    with pytest.raises(ClientError, match="OverLimit"):
        bench.receive(WaitTimeSeconds=0)
    assert bench.receive() == []
    bench.clock.now += 30
    assert len(bench.receive()) == 2


def test_quota_on_fifo():
    """At the quota of messages in flight a FIFO queue gives no error.

    [D] queues.
    """
    fifo = Bench(fifo=True, max_in_flight=1)
    for body in "ab":
        fifo.send(body, MessageGroupId=body)
    assert fifo.bodies() == ["a"]
    assert fifo.receive(WaitTimeSeconds=0) == []


def test_delayed_message(bench):
    """A delayed message is not in flight.

    [D] queues.
    """
    bench.send("a", DelaySeconds=10)
    bench.send("b")
    bench.receive()
    counts = bench.sqs.get_queue_attributes(QueueUrl=bench.url, AttributeNames=["All"])
    names = ("", "NotVisible", "Delayed")
    counted = [counts["Attributes"][f"ApproximateNumberOfMessages{name}"] for name in names]
    assert counted == ["0", "1", "1"]


def text(value="v"):
    return {"DataType": "String", "StringValue": value}


def test_attributes_of_receive(bench):
    """A receive returns only the attributes that the caller asks for.

    [D] API: ReceiveMessage. Without messages there is no list of them.
    """
    assert bench.sqs.receive_message(QueueUrl=bench.url) == {}
    bench.send(MessageAttributes={"a": text(), "b": text()})
    answer = bench.sqs.receive_message(QueueUrl=bench.url, MessageAttributeNames=["a"])
    [message] = answer["Messages"]
    assert (message["Attributes"], list(message["MessageAttributes"])) == ({}, ["a"])


# Retention


def test_retention():
    """SQS keeps a message for the retention period, whether it is hidden or not.

    [D] messages: 60 s to 14 days, 4 days by default.
    """
    bench = Bench(MessageRetentionPeriod="60", VisibilityTimeout="50")
    gone = []
    bench.queue.on_gone = lambda how, message: gone.append(how)
    bench.send()
    bench.clock.now += 20
    [message] = bench.receive()
    bench.clock.now += 40
    assert bench.hide(message, 5) == "InvalidParameterValue"
    assert gone == ["expired"]


def test_max_receive_count(bench):
    """SQS moves a message to the DLQ on the receive after the last one allowed.

    [D] DLQ; [R 2024-04-30] for the source ARN, the id, and the count that goes on.
    """
    bench.send(MessageAttributes={"a": text()})
    for _ in range(3):
        [before] = bench.receive(VisibilityTimeout=0)
    assert len(bench.queue.messages) == 1
    assert bench.receive() == []
    [after] = bench.receive(bench.dlq, MessageAttributeNames=["All"])
    assert after["MessageId"] == before["MessageId"]
    assert after["MessageAttributes"] == {"a": text()}
    assert after["Attributes"]["ApproximateReceiveCount"] == "4"
    assert after["Attributes"]["DeadLetterQueueSourceArn"] == bench.queue.arn


def test_age_after_move(bench):
    """A standard message keeps its age when SQS moves it.

    [D] DLQ: it expires by the original clock.
    """
    sent_at = bench.clock.now
    bench.send()
    bench.clock.now += HOUR
    for _ in range(4):
        bench.receive(VisibilityTimeout=0)
    [message] = bench.receive(bench.dlq)
    assert message["Attributes"]["SentTimestamp"] == str(int(sent_at * 1000))
    bench.clock.now = sent_at + 345_600
    assert bench.receive(bench.dlq) == []


def test_age_after_move_on_fifo(fifo):
    """A FIFO message starts anew when SQS moves it.

    [D] DLQ: its enqueue time, and its message id for a deduplication id.
    """
    message_id = fifo.send(MessageGroupId="g")
    fifo.clock.now += HOUR
    for _ in range(4):
        fifo.receive(VisibilityTimeout=0)
    [message] = fifo.receive(fifo.dlq)
    assert message["Attributes"]["SentTimestamp"] == str(int(fifo.clock.now * 1000))
    assert message["Attributes"]["MessageDeduplicationId"] == message_id


# FIFO


def test_order_in_group(fifo):
    """One receive brings several messages of a group, in order.

    [D] FIFO; [R].
    """
    for body in "abc":
        fifo.send(body, MessageGroupId="g")
    assert fifo.bodies() == ["a", "b", "c"]


def test_group_with_hidden_message(fifo):
    """SQS gives out no message of a group while another one is hidden.

    [D] FIFO; [R] test_fifo_message_group_visibility_after_partial_delete, ..._after_delete.
    """
    for body in "abc":
        fifo.send(body, MessageGroupId="g")
    fifo.send("other", MessageGroupId="h")
    a, b = fifo.receive(MaxNumberOfMessages=2)
    assert fifo.bodies() == ["other"]
    fifo.delete(a)
    assert fifo.bodies() == []
    fifo.delete(b)
    assert fifo.bodies() == ["c"]


def test_first_of_group_comes_back(fifo):
    """The first message of a group comes back while the second is hidden.

    [R] test_fifo_message_group_visibility_after_terminate_visibility_timeout; and, for the
    second's extension, 2025-11-19.
    """
    for body in "abc":
        fifo.send(body, MessageGroupId="g")
    a, b, _ = fifo.receive()
    fifo.hide(a, 0)
    assert fifo.bodies() == ["a"]
    fifo.hide(b, 600)
    fifo.clock.now += 30
    assert fifo.bodies() == ["a"]


def test_deduplication(fifo):
    """For 5 minutes SQS drops a second message with the same deduplication id.

    [D] FIFO; [R]: also when the first one has been deleted.
    """
    first = fifo.send(MessageGroupId="g")
    [message] = fifo.receive()
    fifo.delete(message)
    fifo.clock.now += 299
    assert fifo.send(MessageGroupId="g") == first
    assert fifo.receive() == []
    fifo.clock.now += 1
    assert fifo.send(MessageGroupId="g") != first
    assert fifo.bodies() == ["a"]


def test_delay_of_fifo_queue():
    """A FIFO queue's delay is the delay of its messages.

    [R] test_fifo_queue_send_message_with_delay_on_queue_works; 0 counts as none.
    """
    fifo = Bench(fifo=True, DelaySeconds="2")
    fifo.send(MessageGroupId="g", DelaySeconds=0)
    assert fifo.bodies() == []
    fifo.clock.now += 2
    assert fifo.bodies() == ["a"]


# Batches


def test_bad_entry_of_batch(bench):
    """A bad entry fails alone, and the others of its batch are sent.

    [D] API: SendMessageBatch: HTTP 200, with ``Failed``.
    """
    entries = [
        {"Id": "good", "MessageBody": "a"},
        {"Id": "bad", "MessageBody": "b", "DelaySeconds": 901},
    ]
    answer = bench.sqs.send_message_batch(QueueUrl=bench.url, Entries=entries)
    assert [entry["Id"] for entry in answer["Successful"]] == ["good"]
    [failed] = answer["Failed"]
    assert (failed["Id"], failed["Code"]) == ("bad", "InvalidParameterValue")
    assert failed["SenderFault"]


# Faults, which tests ask for


def test_fault_before_effect(bench):
    """A fault makes a call fail before it has any effect."""
    bench.send()
    [message] = bench.receive()
    bench.sqs.faults.append(Fault("DeleteMessageBatch", "InternalError"))
    with pytest.raises(ClientError):
        bench.delete(message)
    assert len(bench.queue.messages) == 1
    assert bench.delete(message) is None


def test_fault_after_effect(bench):
    """A fault may lose the answer to a call that had its effect."""
    bench.send()
    [message] = bench.receive()
    lost = ReadTimeoutError(endpoint_url="x")
    bench.sqs.faults.append(Fault("DeleteMessageBatch", lost, after=True))
    hit = []
    bench.sqs.on_fault = lambda fault, bodies: hit.extend(bodies)
    with pytest.raises(ReadTimeoutError):
        bench.delete(message)
    assert (bench.queue.messages, hit) == ([], ["a"])


def test_fault_of_entries(bench):
    """A fault may make some entries of a batch fail on the side of SQS."""
    bench.sqs.faults.append(Fault("SendMessageBatch", "InternalError", entries=frozenset({1})))
    entries = [{"Id": str(i), "MessageBody": f"m{i}"} for i in range(3)]
    answer = bench.sqs.send_message_batch(QueueUrl=bench.url, Entries=entries)
    assert answer["Failed"] == [{"Id": "1", "Code": "InternalError", "SenderFault": False}]
    assert bench.bodies() == ["m0", "m2"]
