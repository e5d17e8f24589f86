"""The fake SQS of our tests does and refuses the same as SQS.

Each rule names its source. [D] is one of the pages of AWS listed below. [R] is an answer of AWS
recorded in LocalStack's tests (``@markers.aws.validated`` in tests/aws/services/sqs, at 8b9a79f0).
[I] is an issue on GitHub.

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
        return error_code(self.sqs.change_message_visibility_batch, self.url, message, seconds)

    def delete(self, message):
        return error_code(self.sqs.delete_message_batch, self.url, message)


def error_code(call, url, message, seconds=None):
    """Make a batch call with one entry. Return its error code, or None if it succeeded."""
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
#: The longest body of a message with the attribute ``a``.
ROOM = 1_048_576 - len("a" + "String" + "v")

#: Calls that SQS refuses, each with its error code.
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

#: Calls that SQS refuses on a FIFO queue, each with its error code.
#: [D] API: SendMessage; [R] test_fifo_queue_send_message_with_delay_seconds_fails.
REFUSED_ON_FIFO = {
    "no group": (send(), "MissingParameter"),
    "a delay of its own": (send(MessageGroupId="g", DelaySeconds=1), VALUE),
}


@pytest.mark.parametrize(("call", "error"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(bench, call, error):
    """SQS refuses each invalid call with the error code of its case."""
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
    """SQS accepts the greatest and the least values that it allows."""
    bench.send("x" * ROOM, MessageAttributes={"a": text()}, DelaySeconds=900)
    bench.send(MessageAttributes={f"a{i}": text() for i in range(10)}, DelaySeconds=0)
    assert bench.bodies(VisibilityTimeout=43_200) == ["a"]
    bench.clock.now += 900
    assert bench.bodies(VisibilityTimeout=0) == ["x" * ROOM]


# Visibility


def test_hidden_by_receive(bench):
    """A receive hides its message for the queue's visibility timeout.

    [D] visibility: 30 s by default. Each receive starts a new timeout.
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
    """A new visibility timeout counts from the call that sets it. 0 shows the message at once.

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
    """SQS hides a message for at most 12 hours, counted from its receive.

    [D] visibility: extending does not reset the maximum of 12 hours.
    """
    bench.send()
    [message] = bench.receive()
    assert bench.hide(message, 12 * HOUR) is None  # in the second of the receive
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
    """After the visibility timeout, SQS confirms a change of the visibility but does nothing.

    [R] on a standard queue; [I] LocalStack 9632.
    """
    bench.send()
    [message] = bench.receive()
    bench.clock.now += 30
    assert bench.hide(message, 600) is None
    assert not bench.sqs.changes[-1].worked
    assert len(bench.receive()) == 1


def test_change_by_stale_handle(bench):
    """A handle of an earlier receive can show a message that another consumer has received since.

    [R] test_terminate_visibility_timeout_after_receive.
    """
    bench.send()
    [stale] = bench.receive()
    bench.clock.now += 30
    bench.receive()
    assert bench.hide(stale, 0) is None
    assert len(bench.receive()) == 1


def test_late_delete(bench):
    """After the visibility timeout, a delete still works if the message was not received again.

    [D] API: DeleteMessage; [R].
    """
    bench.send()
    [message] = bench.receive()
    bench.clock.now += 30
    assert bench.delete(message) is None
    assert bench.receive() == []
    assert bench.delete(message) is None, "SQS confirms a second delete too"


@pytest.mark.parametrize("works", [True, False])
def test_delete_by_stale_handle(bench, works):
    """SQS confirms a delete with a handle of an earlier receive, but may do nothing.

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
    """On a FIFO queue, SQS refuses a handle after the visibility timeout.

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

    [R] for unknown handles and deleted messages; [I] boto3 2898 for 12 hours after the receive.
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
    """If too many messages are in flight, a short poll fails and a long poll returns no message.

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
    """If too many messages of a FIFO queue are in flight, a short poll returns no message.

    [D] queues.
    """
    fifo = Bench(fifo=True, max_in_flight=1)
    for body in "ab":
        fifo.send(body, MessageGroupId=body)
    assert fifo.bodies() == ["a"]
    assert fifo.receive(WaitTimeSeconds=0) == []


def test_delayed_message(bench):
    """A delayed message does not count as in flight.

    [D] queues.
    """
    bench.send("a", DelaySeconds=10)
    bench.send("b")
    bench.receive()
    counts = bench.sqs.get_queue_attributes(QueueUrl=bench.url, AttributeNames=["All"])
    names = ("", "NotVisible", "Delayed")
    counted = [counts["Attributes"][f"ApproximateNumberOfMessages{name}"] for name in names]
    assert counted == ["0", "1", "1"]


def test_attributes_of_receive(bench):
    """A receive returns only the attributes that the caller asks for.

    [D] API: ReceiveMessage. An answer without messages has no ``Messages``.
    """
    assert bench.sqs.receive_message(QueueUrl=bench.url) == {}
    bench.send(MessageAttributes={"a": text(), "b": text()})
    answer = bench.sqs.receive_message(QueueUrl=bench.url, MessageAttributeNames=["a"])
    [message] = answer["Messages"]
    assert (message["Attributes"], list(message["MessageAttributes"])) == ({}, ["a"])


# Retention


def test_retention():
    """SQS deletes a message at the end of the retention period, even if it is hidden.

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
    """After ``maxReceiveCount`` receives, the next receive moves the message to the DLQ.

    [D] DLQ; [R 2024-04-30]: the message has the ARN of its source, keeps its ID and goes on
    counting receives.
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
    """When SQS moves a message to a standard DLQ, the message keeps its age.

    [D] DLQ.
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
    """When SQS moves a message to a FIFO DLQ, the message's age starts again at 0.

    [D] DLQ. The message ID becomes the deduplication ID.
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
    """While a message of a group is hidden, SQS delivers no later message of the group.

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
    """SQS delivers the first message of a group again even while the second one is hidden.

    [R] test_fifo_message_group_visibility_after_terminate_visibility_timeout; [R 2025-11-19] if
    the second one is hidden for longer.
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
    """For 5 minutes SQS drops a second message with the same deduplication ID.

    [D] FIFO; [R] even if the first one has been deleted.
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
    """A FIFO queue delays all its messages by its own ``DelaySeconds``.

    [R] test_fifo_queue_send_message_with_delay_on_queue_works. A message's own delay may be 0.
    """
    fifo = Bench(fifo=True, DelaySeconds="2")
    fifo.send(MessageGroupId="g", DelaySeconds=0)
    assert fifo.bodies() == []
    fifo.clock.now += 2
    assert fifo.bodies() == ["a"]


# Batches


def test_bad_entry_of_batch(bench):
    """If one entry of a batch is invalid, SQS still sends the others.

    [D] API: SendMessageBatch answers HTTP 200 with a list ``Failed``.
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


# Faults that tests inject


def test_fault_before_effect(bench):
    """An injected fault can make a call fail before it has any effect."""
    bench.send()
    [message] = bench.receive()
    bench.sqs.faults.append(Fault("DeleteMessageBatch", "InternalError"))
    with pytest.raises(ClientError):
        bench.delete(message)
    assert len(bench.queue.messages) == 1
    assert bench.delete(message) is None


def test_fault_after_effect(bench):
    """An injected fault can lose the answer to a call that SQS has carried out."""
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
    """An injected fault can make some entries of a batch fail by a fault of SQS."""
    bench.sqs.faults.append(Fault("SendMessageBatch", "InternalError", entries=frozenset({1})))
    entries = [{"Id": str(i), "MessageBody": f"m{i}"} for i in range(3)]
    answer = bench.sqs.send_message_batch(QueueUrl=bench.url, Entries=entries)
    assert answer["Failed"] == [{"Id": "1", "Code": "InternalError", "SenderFault": False}]
    assert bench.bodies() == ["m0", "m2"]
