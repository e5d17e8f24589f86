"""The strict fake SQS: each rule, with where it is from.

[D] the page of AWS that says so; [R] an answer of AWS recorded in LocalStack's tests
(``@markers.aws.validated`` in tests/aws/services/sqs, at 8b9a79f0); [I] an issue that shows it.

- visibility: https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-visibility-timeout.html
- messages, queues: .../SQSDeveloperGuide/quotas-messages.html, .../quotas-queues.html
- DLQ: .../SQSDeveloperGuide/sqs-dead-letter-queues.html
- FIFO: .../SQSDeveloperGuide/FIFO-queues-understanding-logic.html
- API: .../latest/APIReference/API_<action>.html
"""

from __future__ import annotations

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


def refusal(call, **options):
    with pytest.raises(ClientError) as info:
        call(**options)
    return info.value.response["Error"]["Code"]


@pytest.fixture
def bench():
    return Bench()


@pytest.fixture
def fifo():
    return Bench(fifo=True)


# Visibility


def test_a_received_message_is_hidden_for_the_queues_timeout(bench):
    """[D] visibility: 30 s by default; a new receive counts from anew."""
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


def test_a_change_counts_from_its_call_and_0_shows_the_message_at_once(bench):
    """[D] visibility."""
    bench.send()
    [message] = bench.receive()
    bench.clock.now += 20
    bench.hide(message, 30)
    bench.clock.now += 29
    assert bench.receive() == []
    bench.hide(message, 0)
    assert len(bench.receive()) == 1


def test_twelve_hours_are_counted_from_the_receive(bench):
    """[D] visibility: extending does not reset the maximum of 12 hours."""
    bench.send()
    [message] = bench.receive()
    assert bench.hide(message, 12 * HOUR) is None  # in the same second
    bench.clock.now += 5 * HOUR
    assert bench.hide(message, 7 * HOUR + 1) == "InvalidParameterValue"
    assert bench.hide(message, 7 * HOUR) is None


@pytest.mark.parametrize("seconds", [-1, 43_201])
def test_a_visibility_timeout_is_0_to_43200(bench, seconds):
    """[D] API: ChangeMessageVisibility, ReceiveMessage."""
    bench.send()
    assert refusal(bench.receive, VisibilityTimeout=seconds) == "InvalidParameterValue"
    [message] = bench.receive()
    assert bench.hide(message, seconds) == "InvalidParameterValue"


# Receipt handles


def test_a_change_after_the_window_says_yes_and_does_nothing(bench):
    """[R] on a standard queue; LocalStack's issue 9632."""
    bench.send()
    [message] = bench.receive()
    bench.clock.now += 30
    assert bench.hide(message, 600) is None
    assert not bench.sqs.changes[-1].worked
    assert len(bench.receive()) == 1


def test_a_stale_handle_changes_the_visibility_of_a_message_that_another_holds(bench):
    """[R] test_terminate_visibility_timeout_after_receive."""
    bench.send()
    [stale] = bench.receive()
    bench.clock.now += 30
    bench.receive()
    assert bench.hide(stale, 0) is None
    assert len(bench.receive()) == 1


def test_a_delete_works_after_the_window_if_nobody_has_received_the_message_since(bench):
    """[D] API: DeleteMessage; [R]."""
    bench.send()
    [message] = bench.receive()
    bench.clock.now += 30
    assert bench.delete(message) is None
    assert bench.receive() == []
    assert bench.delete(message) is None, "again"


@pytest.mark.parametrize("works", [True, False])
def test_a_delete_with_a_stale_handle_says_yes_and_may_do_nothing(bench, works):
    """[D] API: DeleteMessage, "the message might not be deleted"."""
    bench.queue.stale_handles_delete = works
    bench.send()
    [stale] = bench.receive()
    bench.clock.now += 30
    bench.receive()
    assert bench.delete(stale) is None
    assert (bench.queue.messages == []) is works


def test_no_handle_is_older_than_12_hours(bench):
    """[I] boto3 2898: a delete on a standard queue, 55,000 s after the receive."""
    bench.send()
    [message] = bench.receive()
    bench.clock.now += 12 * HOUR + 1
    assert bench.delete(message) == "InvalidParameterValue"


def test_the_handle_of_a_deleted_message_changes_nothing(bench):
    """[R] "Message does not exist or is not available for visibility timeout change"."""
    bench.send()
    [message] = bench.receive()
    bench.delete(message)
    assert bench.hide(message, 5) == "InvalidParameterValue"


def test_a_handle_that_never_was_is_refused(bench):
    """[R] for a delete and a change; a handle is valid in its own queue only."""
    garbage = {"ReceiptHandle": "x"}
    assert bench.delete(garbage) == bench.hide(garbage, 5) == "ReceiptHandleIsInvalid"


def test_on_a_fifo_queue_a_handle_ends_with_its_window(fifo):
    """[R 2025-03-28] "The receipt handle has expired"; [I] kombu 1391 for a change."""
    fifo.send(MessageGroupId="g")
    [message] = fifo.receive()
    fifo.clock.now += 30
    assert fifo.delete(message) == fifo.hide(message, 5) == "InvalidParameterValue"
    fifo.receive()
    assert fifo.delete(message) == fifo.hide(message, 5) == "InvalidParameterValue"


# Quotas


def test_at_the_quota_in_flight_a_short_poll_fails_and_a_long_one_is_empty():
    """[D] queues: 120,000 by default."""
    bench = Bench(max_in_flight=2)
    for body in "abc":
        bench.send(body)
    assert bench.bodies() == ["a", "b"]
    assert refusal(bench.receive, WaitTimeSeconds=0) == "OverLimit"
    assert bench.receive() == []
    bench.clock.now += 30
    assert len(bench.receive()) == 2


def test_at_the_quota_a_fifo_queue_gives_no_error():
    """[D] queues."""
    fifo = Bench(fifo=True, max_in_flight=1)
    for body in "ab":
        fifo.send(body, MessageGroupId=body)
    assert fifo.bodies() == ["a"]
    assert fifo.receive(WaitTimeSeconds=0) == []


def test_a_delayed_message_is_not_in_flight(bench):
    """[D] queues."""
    bench.send("a", DelaySeconds=10)
    bench.send("b")
    bench.receive()
    counts = bench.sqs.get_queue_attributes(QueueUrl=bench.url, AttributeNames=["All"])
    names = ("", "NotVisible", "Delayed")
    counted = [counts["Attributes"][f"ApproximateNumberOfMessages{name}"] for name in names]
    assert counted == ["0", "1", "1"]


def text(value="v"):
    return {"DataType": "String", "StringValue": value}


def test_a_message_has_ten_attributes_at_most(bench):
    """[D] messages."""
    attributes = {f"a{i}": text() for i in range(11)}
    assert refusal(bench.send, MessageAttributes=attributes) == "InvalidParameterValue"
    del attributes["a0"]
    bench.send(MessageAttributes=attributes)


@pytest.mark.parametrize(
    "attribute",
    [text(""), {**text(), "StringListValues": []}, {"DataType": "Binary", "StringValue": "v"}],
    ids=["empty", "as it was received", "of another type"],
)
def test_an_attribute_has_one_value(bench, attribute):
    """[D] API: MessageAttributeValue."""
    assert refusal(bench.send, MessageAttributes={"a": attribute}) == "InvalidParameterValue"


def test_a_message_is_1_mib_at_most_with_names_types_and_values_of_attributes(bench):
    """[D] messages; [R 2025-08-19]."""
    room = 1_048_576 - len("a" + "String" + "v")
    bench.send("x" * room, MessageAttributes={"a": text()})
    too_long = {"body": "x" * room + "x", "MessageAttributes": {"a": text()}}
    assert refusal(bench.send, **too_long) == "InvalidParameterValue"


def test_a_batch_is_1_mib_at_most(bench):
    """[D] messages."""
    entries = [{"Id": str(i), "MessageBody": "x" * 600_000} for i in range(2)]
    send = {"call": bench.sqs.send_message_batch, "QueueUrl": bench.url}
    assert refusal(**send, Entries=entries) == "AWS.SimpleQueueService.BatchRequestTooLong"


@pytest.mark.parametrize("body", ["", "\0", "\ufffe"])
def test_a_body_is_characters_of_xml(bench, body):
    """[D] API: SendMessage."""
    assert refusal(bench.send, body=body) in {"MissingParameter", "InvalidMessageContents"}


@pytest.mark.parametrize(("delay", "is_taken"), [(-1, False), (0, True), (900, True), (901, False)])
def test_a_delay_is_0_to_900(bench, delay, is_taken):
    """[D] messages."""
    if is_taken:
        bench.send(DelaySeconds=delay)
        assert (bench.bodies() == ["a"]) is (delay == 0)
        bench.clock.now += delay
        assert bench.queue.counts()["ApproximateNumberOfMessagesDelayed"] == 0
    else:
        assert refusal(bench.send, DelaySeconds=delay) == "InvalidParameterValue"


@pytest.mark.parametrize(
    "options",
    [
        {"MaxNumberOfMessages": 0},
        {"MaxNumberOfMessages": 11},
        {"WaitTimeSeconds": 21},
    ],
)
def test_a_receive_has_ranges(bench, options):
    """[D] API: ReceiveMessage."""
    assert refusal(bench.receive, **options) == "InvalidParameterValue"


def test_a_receive_tells_only_what_it_is_asked_for(bench):
    """[D] API: ReceiveMessage. Without messages there is no list of them."""
    assert bench.sqs.receive_message(QueueUrl=bench.url) == {}
    bench.send(MessageAttributes={"a": text(), "b": text()})
    answer = bench.sqs.receive_message(QueueUrl=bench.url, MessageAttributeNames=["a"])
    [message] = answer["Messages"]
    assert (message["Attributes"], list(message["MessageAttributes"])) == ({}, ["a"])


# Retention


def test_a_message_is_kept_for_the_retention_period_hidden_or_not():
    """[D] messages: 60 s to 14 days, 4 days by default."""
    bench = Bench(MessageRetentionPeriod="60", VisibilityTimeout="50")
    gone = []
    bench.queue.on_gone = lambda how, message: gone.append(how)
    bench.send()
    bench.clock.now += 20
    [message] = bench.receive()
    bench.clock.now += 40
    assert bench.hide(message, 5) == "InvalidParameterValue"
    assert gone == ["expired"]


def test_a_message_is_moved_on_the_receive_after_the_last_one_allowed(bench):
    """[D] DLQ; [R 2024-04-30] for the source ARN, the id, and the count that goes on."""
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


def test_on_a_move_a_standard_message_keeps_its_age(bench):
    """[D] DLQ: it expires by the original clock."""
    sent_at = bench.clock.now
    bench.send()
    bench.clock.now += HOUR
    for _ in range(4):
        bench.receive(VisibilityTimeout=0)
    [message] = bench.receive(bench.dlq)
    assert message["Attributes"]["SentTimestamp"] == str(int(sent_at * 1000))
    bench.clock.now = sent_at + 345_600
    assert bench.receive(bench.dlq) == []


def test_on_a_move_a_fifo_message_starts_anew(fifo):
    """[D] DLQ: its enqueue time, and its message id for a deduplication id."""
    message_id = fifo.send(MessageGroupId="g")
    fifo.clock.now += HOUR
    for _ in range(4):
        fifo.receive(VisibilityTimeout=0)
    [message] = fifo.receive(fifo.dlq)
    assert message["Attributes"]["SentTimestamp"] == str(int(fifo.clock.now * 1000))
    assert message["Attributes"]["MessageDeduplicationId"] == message_id


@pytest.mark.parametrize(
    "policy",
    [
        {"deadLetterTargetArn": "arn:aws:sqs:us-east-1:1:dlq.fifo", "maxReceiveCount": 3},
        {"deadLetterTargetArn": "arn:aws:sqs:us-east-1:1:dlq", "maxReceiveCount": 0},
        {"deadLetterTargetArn": "arn:aws:sqs:us-east-1:1:dlq", "maxReceiveCount": 1001},
        {"deadLetterTargetArn": "arn:aws:sqs:us-east-1:1:none", "maxReceiveCount": 3},
    ],
    ids=["of the other type", "0", "1001", "no such queue"],
)
def test_a_redrive_policy_that_cannot_work_is_refused(bench, policy):
    """[D] DLQ."""
    bench.sqs.create_queue(QueueName="dlq.fifo", Attributes={"FifoQueue": "true"})
    attributes = {"RedrivePolicy": json.dumps(policy)}
    create = {"call": bench.sqs.create_queue, "QueueName": "other"}
    assert refusal(**create, Attributes=attributes) == "InvalidParameterValue"


@pytest.mark.parametrize(
    "attributes",
    [
        {"VisibilityTimeout": "43201"},
        {"MessageRetentionPeriod": "59"},
        {"MessageRetentionPeriod": "1209601"},
        {"DelaySeconds": "901"},
    ],
)
def test_queue_attributes_have_ranges(bench, attributes):
    """[D] API: SetQueueAttributes."""
    create = {"call": bench.sqs.create_queue, "QueueName": "other"}
    assert refusal(**create, Attributes=attributes) == "InvalidAttributeValue"


# FIFO


def test_one_receive_brings_several_messages_of_a_group_in_order(fifo):
    """[D] FIFO; [R]."""
    for body in "abc":
        fifo.send(body, MessageGroupId="g")
    assert fifo.bodies() == ["a", "b", "c"]


def test_nothing_of_a_group_is_given_out_while_one_is_hidden(fifo):
    """[D] FIFO; [R] test_fifo_message_group_visibility_after_partial_delete, ..._after_delete."""
    for body in "abc":
        fifo.send(body, MessageGroupId="g")
    fifo.send("other", MessageGroupId="h")
    a, b = fifo.receive(MaxNumberOfMessages=2)
    assert fifo.bodies() == ["other"]
    fifo.delete(a)
    assert fifo.bodies() == []
    fifo.delete(b)
    assert fifo.bodies() == ["c"]


def test_the_first_of_a_group_comes_back_while_the_second_is_hidden(fifo):
    """[R] test_fifo_message_group_visibility_after_terminate_visibility_timeout; and, for the
    second's extension, 2025-11-19."""
    for body in "abc":
        fifo.send(body, MessageGroupId="g")
    a, b, _ = fifo.receive()
    fifo.hide(a, 0)
    assert fifo.bodies() == ["a"]
    fifo.hide(b, 600)
    fifo.clock.now += 30
    assert fifo.bodies() == ["a"]


def test_a_second_message_with_the_same_deduplication_id_is_none_for_5_minutes(fifo):
    """[D] FIFO; [R]: also when the first one has been deleted."""
    first = fifo.send(MessageGroupId="g")
    [message] = fifo.receive()
    fifo.delete(message)
    fifo.clock.now += 299
    assert fifo.send(MessageGroupId="g") == first
    assert fifo.receive() == []
    fifo.clock.now += 1
    assert fifo.send(MessageGroupId="g") != first
    assert fifo.bodies() == ["a"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, "MissingParameter"),
        ({"MessageGroupId": "g", "DelaySeconds": 1}, "InvalidParameterValue"),
    ],
    ids=["no group", "a delay of its own"],
)
def test_a_fifo_message_is_refused(fifo, options, error):
    """[D] API: SendMessage; [R] test_fifo_queue_send_message_with_delay_seconds_fails."""
    assert refusal(fifo.send, **options) == error


def test_a_fifo_queue_without_deduplication_by_content_needs_an_id():
    """[D] API: SendMessage."""
    fifo = Bench(fifo=True, ContentBasedDeduplication="false")
    assert refusal(fifo.send, MessageGroupId="g") == "InvalidParameterValue"
    fifo.send(MessageGroupId="g", MessageDeduplicationId="1")


def test_a_fifo_queues_delay_is_that_of_its_messages():
    """[R] test_fifo_queue_send_message_with_delay_on_queue_works; 0 counts as none."""
    fifo = Bench(fifo=True, DelaySeconds="2")
    fifo.send(MessageGroupId="g", DelaySeconds=0)
    assert fifo.bodies() == []
    fifo.clock.now += 2
    assert fifo.bodies() == ["a"]


# Batches


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        ([], "EmptyBatchRequest"),
        ([str(i) for i in range(11)], "TooManyEntriesInBatchRequest"),
        (["1", "1"], "BatchEntryIdsNotDistinct"),
        (["a b"], "InvalidBatchEntryId"),
        (["x" * 81], "InvalidBatchEntryId"),
    ],
    ids=["none", "eleven", "twice the same", "a space", "81 characters"],
)
def test_a_batch_is_1_to_10_entries_with_ids_of_their_own(bench, ids, error):
    """[D] API: DeleteMessageBatch."""
    entries = [{"Id": i, "ReceiptHandle": "x"} for i in ids]
    delete = {"call": bench.sqs.delete_message_batch, "QueueUrl": bench.url}
    assert refusal(**delete, Entries=entries) == f"AWS.SimpleQueueService.{error}"


def test_the_entries_of_a_batch_fail_one_by_one(bench):
    """[D] API: SendMessageBatch: HTTP 200, with ``Failed``."""
    entries = [
        {"Id": "good", "MessageBody": "a"},
        {"Id": "bad", "MessageBody": "b", "DelaySeconds": 901},
    ]
    answer = bench.sqs.send_message_batch(QueueUrl=bench.url, Entries=entries)
    assert [entry["Id"] for entry in answer["Successful"]] == ["good"]
    [failed] = answer["Failed"]
    assert (failed["Id"], failed["Code"]) == ("bad", "InvalidParameterValue")
    assert failed["SenderFault"]


def test_a_queue_that_is_not_there(bench):
    """[D] API: common errors, by the code that botocore shows."""
    error = refusal(bench.sqs.receive_message, QueueUrl="https://sqs.example/1/none")
    assert error == "AWS.SimpleQueueService.NonExistentQueue"


# Faults, which tests ask for


def test_a_call_fails_before_it_has_had_any_effect(bench):
    bench.send()
    [message] = bench.receive()
    bench.sqs.faults.append(Fault("DeleteMessageBatch", "InternalError"))
    with pytest.raises(ClientError):
        bench.delete(message)
    assert len(bench.queue.messages) == 1
    assert bench.delete(message) is None


def test_the_answer_to_a_call_is_lost(bench):
    bench.send()
    [message] = bench.receive()
    lost = ReadTimeoutError(endpoint_url="x")
    bench.sqs.faults.append(Fault("DeleteMessageBatch", lost, after=True))
    hit = []
    bench.sqs.on_fault = lambda fault, bodies: hit.extend(bodies)
    with pytest.raises(ReadTimeoutError):
        bench.delete(message)
    assert (bench.queue.messages, hit) == ([], ["a"])


def test_some_entries_of_a_batch_fail_on_the_side_of_sqs(bench):
    bench.sqs.faults.append(Fault("SendMessageBatch", "InternalError", entries=frozenset({1})))
    entries = [{"Id": str(i), "MessageBody": f"m{i}"} for i in range(3)]
    answer = bench.sqs.send_message_batch(QueueUrl=bench.url, Entries=entries)
    assert answer["Failed"] == [{"Id": "1", "Code": "InternalError", "SenderFault": False}]
    assert bench.bodies() == ["m0", "m2"]
