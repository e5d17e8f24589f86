"""The keeper, turned by hand: what it asks of SQS, in which order, and how it takes the answers."""

import itertools
import threading
from collections import deque
from dataclasses import replace

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, ReadTimeoutError

from celery_sqs_backoff import threads
from celery_sqs_backoff.sqs.calls import Calls
from celery_sqs_backoff.sqs.dead_letter import ATTRIBUTE_NAME
from celery_sqs_backoff.sqs.delivery import Delivery
from celery_sqs_backoff.sqs.queues import Queue
from celery_sqs_backoff.worker.keeper import Keeper
from celery_sqs_backoff.worker.lease import Lease, State, may_start
from tests.support.leases import some_record
from tests.support.processes import eventually

URL = "https://sqs.example/1/q"
QUEUE = Queue(URL, visibility_timeout_seconds=30, dlq_arn="arn:aws:sqs:us-east-1:1:q-dlq")

DELETE = "DeleteMessageBatch"
HIDE = "ChangeMessageVisibilityBatch"
SEND = "SendMessageBatch"


class FakeSQS:
    """Answers every call with success, or with what `fail` says of it; keeps what was asked."""

    def __init__(self):
        self.calls = []
        self.fail = lambda action, handle: None
        self.during_call = lambda action: None

    def delete_message_batch(self, QueueUrl, Entries):  # noqa: N803
        return self._batch(DELETE, Entries)

    def change_message_visibility_batch(self, QueueUrl, Entries):  # noqa: N803
        return self._batch(HIDE, Entries)

    def send_message_batch(self, QueueUrl, Entries):  # noqa: N803
        self.calls.append((SEND, [{"QueueUrl": QueueUrl, **entry} for entry in Entries]))
        return self._answer(SEND, {entry["Id"]: entry["MessageBody"] for entry in Entries})

    def _batch(self, action, entries):
        self.calls.append(
            (action, [(e["ReceiptHandle"], e.get("VisibilityTimeout")) for e in entries])
        )
        self.during_call(action)
        return self._answer(action, {e["Id"]: e["ReceiptHandle"] for e in entries})

    def _answer(self, action, entries):
        codes = {number: self.fail(action, what) for number, what in entries.items()}
        for code in codes.values():
            self._raise_for(code, action)
        failed = [{"Id": i, "Code": code, "SenderFault": True} for i, code in codes.items() if code]
        done = [{"Id": i, "MessageId": f"sent {i}"} for i, code in codes.items() if not code]
        return {"Successful": done, "Failed": failed}

    @staticmethod
    def _raise_for(code, action):
        if isinstance(code, Exception):
            raise code
        if code == "AccessDenied":
            raise ClientError({"Error": {"Code": code}}, action)

    def asked(self, action):
        return [entries for name, entries in self.calls if name == action]


class Bench:
    """A keeper with a clock of its own, and leases on a fake SQS."""

    def __init__(self):
        self.now = 1_000.0
        self.sqs = FakeSQS()
        self.keeper = Keeper(clock=lambda: self.now)
        self.freed = []
        self._ids = itertools.count()

    def lease(self, queue=QUEUE, message_id=None, calls=None, received_at=None, **facts):
        n = next(self._ids)
        message_id = message_id or f"m{n}"
        lease = Lease(
            calls=calls or Calls(self.sqs, queue.url),
            queue=queue,
            message={"ReceiptHandle": f"h{n}"},
            body=f"body {n}",
            delivery=Delivery(message_id=message_id, queue_url=queue.url, received_at=0.0, **facts),
            received_at=self.now if received_at is None else received_at,
            keeper=self.keeper,
            free=lambda: self.freed.append(f"h{n}"),
        )
        self.keeper.hold(lease)
        return lease

    def turn(self, seconds=0.0):
        """Let time pass, and do all that is due."""
        self.now += seconds
        while job := self.keeper.next_job():
            self.keeper.perform(job)


@pytest.fixture
def bench():
    return Bench()


def a_record():
    return some_record(0.0, origin=URL)


# What is known of a queue


def test_a_receive_names_the_visibility_timeout_that_renewals_go_by(bench):
    """The queue's own may have been lowered since it was read."""
    assert bench.keeper.seconds_to_receive_for(Queue(URL, visibility_timeout_seconds=60)) == 60
    assert bench.keeper.seconds_to_receive_for(Queue(URL, is_read=False)) == 30


# Settling


def test_ten_settlements_are_one_call(bench):
    for lease in [bench.lease() for _ in range(10)]:
        lease.done()
    bench.turn()
    assert [len(entries) for entries in bench.sqs.asked(DELETE)] == [10]


def test_a_lonely_settlement_waits_a_moment_for_others(bench):
    bench.lease().done()
    bench.turn()
    assert bench.sqs.calls == []
    bench.turn(0.1)
    assert bench.sqs.asked(DELETE) == [[("h0", None)]]


def test_twenty_five_settlements_are_three_calls_in_their_order(bench):
    for lease in [bench.lease() for _ in range(25)]:
        lease.done()
    bench.turn()
    bench.turn(0.2)
    handles = [h for entries in bench.sqs.asked(DELETE) for h, _ in entries]
    assert handles == [f"h{i}" for i in range(25)]
    assert len(bench.sqs.asked(DELETE)) == 3


def test_a_backoff_asks_for_the_whole_delay_although_it_waited_for_the_batch(bench):
    bench.lease().defer(7)
    bench.turn(0.1)
    assert bench.sqs.asked(HIDE) == [[("h0", 7)]]


def test_a_backoff_that_was_held_up_asks_for_what_is_left_and_at_least_a_second(bench):
    answers = iter(["InternalError", None])
    bench.sqs.fail = lambda action, handle: next(answers)
    bench.lease().defer(3)
    bench.turn(0.1)
    bench.turn(20)
    assert bench.sqs.asked(HIDE) == [[("h0", 3)], [("h0", 1)]]


def test_a_released_message_is_visible_at_once(bench):
    bench.lease().release()
    bench.turn(0.1)
    assert bench.sqs.asked(HIDE) == [[("h0", 0)]]


def test_only_the_first_settlement_counts(bench):
    lease = bench.lease()
    assert lease.defer(5)
    assert not lease.done()
    assert not lease.release()
    bench.turn(0.2)
    assert bench.sqs.calls == [(HIDE, [("h0", 5)])]


def test_settling_frees_the_place_in_the_prefetch_window_before_sqs_answers(bench):
    bench.lease().done()
    assert bench.freed == ["h0"]
    assert bench.sqs.calls == []


# Errors


def test_only_the_entries_that_failed_are_sent_again(bench):
    failing = {"h1"}
    bench.sqs.fail = lambda action, handle: "InternalError" if handle in failing else None
    for lease in [bench.lease() for _ in range(3)]:
        lease.done()
    bench.turn(0.1)
    failing.clear()
    bench.turn(20)
    assert bench.sqs.asked(DELETE) == [[(f"h{i}", None) for i in range(3)], [("h1", None)]]


def test_a_delete_is_tried_until_sqs_takes_it(bench):
    bench.sqs.fail = lambda action, handle: EndpointConnectionError(endpoint_url="x")
    bench.lease().done()
    for _ in range(50):
        bench.turn(20)
    assert len(bench.sqs.calls) > 10
    bench.sqs.fail = lambda action, handle: None
    bench.turn(20)
    assert bench.keeper.waiting == 0


def test_what_is_done_after_an_outage_is_deleted_soon(bench):
    """Not when the pause is over that has grown during the outage: it would come back."""
    for outage in range(10):
        bench.sqs.fail = lambda action, handle: EndpointConnectionError(endpoint_url="x")
        bench.lease().done()
        for _ in range(30):
            bench.turn(1)
        bench.sqs.fail = lambda action, handle: None
        bench.lease().done()
        bench.turn(3.0)  # a tenth of the visibility timeout
        last = [handle for handle, _ in bench.sqs.asked(DELETE)[-1]]
        assert last == [f"h{2 * outage}", f"h{2 * outage + 1}"]


def test_the_tries_of_a_failing_call_are_spaced_out(bench):
    bench.sqs.fail = lambda action, handle: EndpointConnectionError(endpoint_url="x")
    bench.lease().done()
    for _ in range(600):
        bench.turn(0.1)
    assert 5 < len(bench.sqs.calls) < 60  # a minute


@pytest.mark.parametrize("code", ["ReceiptHandleIsInvalid", "InvalidParameterValue"])
def test_a_void_handle_is_not_tried_again(bench, code):
    bench.sqs.fail = lambda action, handle: code
    bench.lease().done()
    bench.turn(0.1)
    bench.turn(100)
    assert len(bench.sqs.calls) == 1


def test_a_backoff_is_given_up_once_the_message_is_visible_anyway(bench):
    """By then somebody else may hold it; a stale handle could hide it under their feet."""
    bench.sqs.fail = lambda action, handle: "InternalError"
    bench.lease().defer(600)
    for _ in range(10):
        bench.turn(10)
    tries = len(bench.sqs.calls)
    bench.turn(100)
    assert len(bench.sqs.calls) == tries
    assert bench.keeper.waiting == 0


@pytest.mark.parametrize("settle", [Lease.release, lambda lease: lease.defer(1)])
def test_a_message_that_sqs_may_have_shown_is_not_shown_again(bench, settle):
    """The answer was lost: somebody else may hold it, and the old handle would end their hold."""
    bench.sqs.fail = lambda action, handle: ReadTimeoutError(endpoint_url="x")
    settle(bench.lease())
    bench.turn(0.2)
    bench.turn(20)
    assert len(bench.sqs.calls) == 1
    assert bench.keeper.waiting == 0


@pytest.mark.parametrize("settle", [Lease.release, lambda lease: lease.defer(1)])
@pytest.mark.parametrize("error", [EndpointConnectionError(endpoint_url="x"), "InternalError"])
def test_a_message_that_sqs_has_not_shown_is_shown_later(bench, settle, error):
    """The connection was refused, or SQS says that this entry of the batch has failed."""
    bench.sqs.fail = lambda action, handle: error
    settle(bench.lease())
    bench.turn(0.2)
    bench.sqs.fail = lambda action, handle: None
    bench.turn(20)
    assert len(bench.sqs.calls) == 2


def test_a_backoff_whose_answer_was_lost_is_asked_for_again_until_it_is_due(bench):
    bench.sqs.fail = lambda action, handle: ReadTimeoutError(endpoint_url="x")
    bench.lease().defer(20)
    bench.turn(0.2)
    bench.sqs.fail = lambda action, handle: None
    bench.turn(5)
    assert bench.sqs.asked(HIDE)[1] == [("h0", 15)]


def test_a_denied_action_is_said_once_per_queue_and_kept_trying(bench, caplog):
    bench.sqs.fail = lambda action, handle: "AccessDenied" if action == DELETE else None
    for lease in [bench.lease() for _ in range(25)]:
        lease.done()
    for _ in range(20):
        bench.turn(60)
    assert len([r for r in caplog.records if "AccessDenied" in r.getMessage()]) == 1
    assert bench.keeper.waiting == 25


@pytest.mark.parametrize("settle", [Lease.done, lambda lease: lease.defer(600), None])
def test_an_error_that_is_not_of_botocore_is_tried_again(bench, settle):
    """Credentials that stay expired raise a RuntimeError."""
    errors = iter([RuntimeError("the refreshed credentials are still expired")])
    bench.sqs.fail = lambda action, handle: next(errors, None)
    lease = bench.lease()
    if settle is not None:
        settle(lease)
    for _ in range(15):
        bench.turn(1)
    assert len(bench.sqs.calls) >= 2
    assert bench.keeper.waiting == 0
    assert not lease.may_be_lost


# Renewing


def test_what_is_held_is_renewed_before_its_visibility_timeout_ends(bench):
    bench.lease()
    for _ in range(40):
        bench.turn(1)
    assert bench.sqs.asked(HIDE) == [[("h0", 30)]] * 4  # every ten of thirty seconds


def test_renewals_go_ten_to_a_call(bench):
    for _ in range(23):
        bench.lease()
    bench.turn(10)
    assert [len(e) for e in bench.sqs.asked(HIDE)] == [10, 10, 3]


@pytest.mark.hazard("H16")
def test_a_settled_lease_is_never_renewed(bench):
    lease = bench.lease()
    lease.defer(600)
    for _ in range(600):
        bench.turn(0.5)
    assert bench.sqs.asked(HIDE) == [[("h0", 600)]]


@pytest.mark.hazard("H16")
def test_a_backoff_during_a_renewal_is_sent_after_it(bench):
    """The fence: were the renewal to arrive last, it would overwrite the delay."""
    lease = bench.lease()
    bench.sqs.during_call = lambda action: lease.defer(600)
    bench.turn(10)
    bench.turn(1)
    assert bench.sqs.asked(HIDE) == [[("h0", 30)], [("h0", 599)]]


def test_a_renewal_that_fails_in_passing_is_tried_again_soon(bench):
    answers = itertools.chain(["InternalError"], itertools.repeat(None))
    bench.sqs.fail = lambda action, handle: next(answers)
    lease = bench.lease()
    bench.turn(10)
    bench.turn(2)
    assert len(bench.sqs.asked(HIDE)) == 2
    assert lease.state is State.HELD


def test_a_lease_whose_handle_is_void_is_lost_and_settles_nothing(bench, caplog):
    """Its message may be somebody else's by now: no delete, no backoff."""
    lease = bench.lease()
    bench.sqs.fail = lambda action, handle: "ReceiptHandleIsInvalid"
    bench.turn(10)
    assert lease.state is State.LOST
    assert not lease.done()
    bench.turn(60)
    assert len(bench.sqs.calls) == 1
    assert "sqs_backoff.renewal_refused" in caplog.text


@pytest.mark.hazard("H17")
def test_renewing_ends_with_the_twelve_hours_and_never_asks_for_more(bench):
    lease = bench.lease()
    start = bench.now
    while lease.state is State.HELD and bench.now < start + 50_000:
        before = len(bench.sqs.calls)
        bench.turn(5)
        for _, entries in bench.sqs.calls[before:]:
            assert bench.now - start + entries[0][1] <= 43_200
    assert lease.state is State.LOST
    assert bench.now - start > 43_000


@pytest.mark.hazard("H17")
def test_a_short_visibility_timeout_is_renewed_in_time_too(bench):
    queue = Queue(URL, visibility_timeout_seconds=3)
    bench.lease(queue)
    bench.turn(1)
    assert bench.sqs.asked(HIDE) == [[("h0", 10)]]


# Dead-lettering


def test_a_dead_letter_is_sent_before_its_message_is_deleted(bench):
    bench.lease().dead_letter(a_record())
    bench.turn(0.1)
    bench.turn(0.1)
    assert [name for name, _ in bench.sqs.calls] == [SEND, DELETE]
    [sent] = bench.sqs.calls[0][1]
    assert sent["QueueUrl"] == "https://sqs.example/1/q-dlq"
    assert sent["MessageBody"] == "body 0"
    assert ATTRIBUTE_NAME in sent["MessageAttributes"]


REFUSALS = ["AccessDenied", "KmsInvalidState", "InternalError", "InvalidParameterValue"]


@pytest.mark.parametrize("code", REFUSALS)
def test_a_dead_letter_that_cannot_be_sent_stays_hidden_and_is_one_copy_in_the_end(bench, code):
    """Nobody else may run what is given up, and nobody wants 21 copies of it."""
    bench.sqs.fail = lambda action, what: code if action == SEND else None
    visible_at = [bench.now + 30]

    def note(action):
        assert bench.now < visible_at[0], "the message has been visible"
        visible_at[0] = bench.now + bench.sqs.asked(HIDE)[-1][0][1]

    bench.sqs.during_call = note
    bench.lease(message_id="m").dead_letter(a_record())
    for _ in range(3_600):
        bench.turn(1)
    assert bench.now < visible_at[0]
    assert bench.sqs.asked(DELETE) == []
    assert 5 < len(bench.sqs.asked(SEND)) < 60
    assert len(bench.sqs.asked(HIDE)) < 60
    bench.sqs.fail = lambda action, what: None
    bench.sqs.during_call = lambda action: None
    sent = len(bench.sqs.asked(SEND))
    bench.turn(301)
    bench.turn(1)
    assert len(bench.sqs.asked(SEND)) == sent + 1
    assert len(bench.sqs.asked(DELETE)) == 1
    assert bench.keeper.waiting == 0


def test_a_dead_letter_that_cannot_be_sent_is_said_once(bench, caplog):
    bench.sqs.fail = lambda action, what: "AccessDenied" if action == SEND else None
    for _ in range(20):
        bench.lease().dead_letter(a_record())
    for _ in range(100):
        bench.turn(10)
    assert len([r for r in caplog.records if "q-dlq" in r.getMessage()]) == 1


def test_a_dead_letter_that_sqs_finds_unfit_is_sent_without_its_record(bench):
    """The dead-letter queue's MaximumMessageSize may be smaller."""

    def fail(action, what):
        entry = bench.sqs.calls[-1][1][0]
        too_long = action == SEND and ATTRIBUTE_NAME in entry["MessageAttributes"]
        return "InvalidParameterValue" if too_long else None

    bench.sqs.fail = fail
    bench.lease().dead_letter(a_record())
    for _ in range(10):
        bench.turn(1)
    [_, [sent]] = bench.sqs.asked(SEND)
    assert sent["MessageAttributes"] == {}
    assert len(bench.sqs.asked(DELETE)) == 1


def test_a_message_that_comes_back_while_its_dead_letter_is_refused_is_the_same_settlement(bench):
    bench.sqs.fail = lambda action, what: "KmsDisabled" if action == SEND else None
    bench.lease(message_id="m").dead_letter(a_record())
    for _ in range(21):
        bench.turn(30)
        assert bench.keeper.recognise(bench.lease(message_id="m"))
    assert bench.keeper.waiting == 1
    bench.sqs.fail = lambda action, what: None
    sent = len(bench.sqs.asked(SEND))
    bench.turn(301)
    bench.turn(1)
    assert len(bench.sqs.asked(SEND)) == sent + 1
    assert bench.sqs.asked(DELETE) == [[("h21", None)]]


def test_dead_letters_that_wait_do_not_fill_the_memory(bench):
    bench.sqs.fail = lambda action, what: "KmsDisabled" if action == SEND else None
    for _ in range(50):
        lease = bench.lease()
        lease.body = "x" * 1_000_000
        lease.dead_letter(a_record())
    for _ in range(20):
        bench.turn(1)
    assert bench.keeper._table._letter_bytes < 35_000_000
    assert all(bench.keeper.memory.record(f"m{i}") for i in range(50))


def test_a_200_with_an_empty_body_deletes_no_dead_letter(bench):
    bench.sqs.send_message_batch = lambda **_: {}
    bench.lease().dead_letter(a_record())
    for _ in range(5):
        bench.turn(1)
    assert bench.sqs.asked(DELETE) == []


def test_a_throttled_dead_letter_is_sent_again(bench):
    answers = itertools.chain(["RequestThrottled"], itertools.repeat(None))
    bench.sqs.fail = lambda action, what: next(answers) if action == SEND else None
    bench.lease().dead_letter(a_record())
    bench.turn(0.1)
    bench.turn(20)
    bench.turn(1)
    assert [name for name, _ in bench.sqs.calls if name != HIDE] == [SEND, SEND, DELETE]


@pytest.mark.parametrize("trace", ["Root=1-2-3", None])
def test_a_dead_letter_keeps_its_trace(bench, trace):
    lease = bench.lease()
    lease.trace_header = trace
    lease.dead_letter(a_record())
    bench.turn(0.1)
    [sent] = bench.sqs.calls[0][1]
    header = sent.get("MessageSystemAttributes", {}).get("AWSTraceHeader")
    assert header == (trace and {"DataType": "String", "StringValue": trace})


@pytest.mark.parametrize("group", ["customer-7", None])
def test_a_dead_letter_of_a_fair_queue_keeps_its_group(bench, group):
    lease = bench.lease()
    lease.group_id = group
    lease.dead_letter(a_record())
    bench.turn(0.1)
    [sent] = bench.sqs.calls[0][1]
    assert sent.get("MessageGroupId") == group
    assert "MessageDeduplicationId" not in sent


def test_dead_letters_go_in_batches_of_what_sqs_takes(bench):
    """It counts the bytes of a batch together: 1 MiB."""
    small, large = [bench.lease() for _ in range(3)], [bench.lease() for _ in range(2)]
    for lease in large:
        lease.body = "x" * 600_000
    for lease in small + large:
        lease.dead_letter(a_record())
    bench.turn(0.1)
    bench.turn(0.1)
    assert [len(entries) for entries in bench.sqs.asked(SEND)] == [4, 1]
    assert [len(entries) for entries in bench.sqs.asked(DELETE)] == [5]


def test_only_the_dead_letters_that_sqs_took_are_deleted(bench):
    bench.sqs.fail = lambda action, what: "InternalError" if what == "body 1" else None
    for _ in range(3):
        bench.lease().dead_letter(a_record())
    bench.turn(0.1)
    bench.turn(0.1)
    assert bench.sqs.asked(DELETE) == [[("h0", None), ("h2", None)]]
    bench.sqs.fail = lambda action, what: None
    bench.turn(20)
    bench.turn(0.1)
    assert bench.sqs.asked(DELETE)[1:] == [[("h1", None)]]


def test_a_dead_letter_on_a_fifo_queue_keeps_its_group(bench):
    queue = Queue(f"{URL}.fifo", dlq_arn="arn:aws:sqs:us-east-1:1:q-dlq.fifo")
    lease = bench.lease(queue, message_id="m")
    lease.group_id = "customer-7"
    lease.dead_letter(a_record())
    bench.turn(0.1)
    [sent] = bench.sqs.calls[0][1]
    assert (sent["MessageGroupId"], sent["MessageDeduplicationId"]) == ("customer-7", "m")


# Coming back


def test_a_message_that_is_done_is_deleted_when_it_comes_back(bench):
    """SQS is at-least-once, and a delete may be lost: the task must not run again for that."""
    bench.lease(message_id="m").done()
    bench.turn(0.1)
    again = bench.lease(message_id="m")
    assert bench.keeper.recognise(again)
    assert again.state is State.DONE
    bench.turn(0.1)
    assert bench.sqs.asked(DELETE) == [[("h0", None)], [("h1", None)]]


@pytest.mark.parametrize("settle", [Lease.done, lambda lease: lease.defer(600)])
def test_a_message_that_comes_back_while_it_is_settled_is_settled_with_the_newer_handle(
    bench, settle
):
    settle(bench.lease(message_id="m"))
    receives = iter([lambda: bench.lease(message_id="m")])
    bench.sqs.during_call = lambda action: next(receives, lambda: None)()
    bench.turn(0.1)
    bench.turn(0.1)
    assert [entries[0][0] for _, entries in bench.sqs.calls] == ["h0", "h1"]
    assert bench.keeper.waiting == 0
    assert bench.freed == ["h0", "h1"]
    bench.turn(60)
    assert len(bench.sqs.calls) == 2


def test_a_message_that_comes_back_before_it_could_be_hidden_is_not_run_early(bench):
    bench.sqs.fail = lambda action, handle: EndpointConnectionError(endpoint_url="x")
    bench.lease(message_id="m").defer(600)
    bench.turn(31)
    assert bench.keeper.waiting == 0, "too late with the first receipt handle"
    bench.lease(message_id="n").defer(600)
    bench.turn(1)
    assert bench.keeper.recognise(bench.lease(message_id="n"))
    assert bench.keeper.memory.times_given_back("n") == 1
    bench.sqs.fail = lambda action, handle: None
    bench.turn(5)
    assert bench.sqs.asked(HIDE)[-1] == [("h2", 594)]


def test_a_message_on_its_last_receive_runs_rather_than_be_moved_by_sqs(bench):
    bench.lease(message_id="m").defer(600)
    last = bench.lease(message_id="m", receive_count=3, max_receive_count=3)
    assert not bench.keeper.recognise(last)
    assert last.state is State.HELD


def test_a_message_that_backed_off_runs_when_it_comes_back(bench):
    bench.lease(message_id="m").defer(5)
    bench.turn(5)
    assert not bench.keeper.recognise(bench.lease(message_id="m"))


def test_a_message_that_comes_back_while_it_is_held_renews_the_lease_there_is(bench):
    """Its renewals came too late; there must be one run, and the newer handle is the valid one."""
    running = bench.lease(message_id="m")
    running.handed_to_pool = lambda: True
    bench.turn(31)
    again = bench.lease(message_id="m")
    assert bench.keeper.recognise(again)
    assert again.state is State.MERGED
    assert bench.freed == ["h1"], "the place in the window that the second receive took"
    running.done()
    bench.turn(0.1)
    assert bench.sqs.asked(DELETE) == [[("h1", None)]]


def test_the_answer_to_a_renewal_with_the_old_handle_says_nothing_of_the_new_one(bench):
    running = bench.lease(message_id="m")
    bench.sqs.fail = lambda action, handle: "ReceiptHandleIsInvalid" if handle == "h0" else None
    receives = iter([lambda: bench.lease(message_id="m")])
    bench.sqs.during_call = lambda action: next(receives, lambda: None)()
    bench.turn(10)
    assert running.state is State.HELD
    assert running.handle == "h1"


# Losing


def test_a_lease_whose_handle_is_refused_is_lost_and_its_task_is_told(bench):
    lease, told = bench.lease(), []
    lease.on_lost = lambda: told.append("lost")
    bench.sqs.fail = lambda action, handle: "ReceiptHandleIsInvalid"
    bench.turn(10)
    assert (lease.state, told) == (State.LOST, ["lost"])
    assert not lease.done()
    bench.turn(1)
    assert bench.sqs.asked(DELETE) == []


def test_a_task_is_told_once_when_its_message_could_not_be_renewed_in_time(bench):
    lease, told = bench.lease(), []
    lease.handed_to_pool = lambda: True
    lease.on_lost = lambda: told.append("lost")
    bench.sqs.fail = lambda action, handle: EndpointConnectionError(endpoint_url="x")
    bench.turn(29)
    assert told == []
    for _ in range(5):
        bench.turn(10)
    assert told == ["lost"]
    assert lease.state is State.HELD, "nobody else is known to have it: it is deleted when done"


def test_a_task_that_has_not_started_when_its_hold_runs_out_does_not_start(bench):
    """Another worker may have received its message: it comes back to whoever gets it next."""
    lease = bench.lease(message_id="m")
    bench.sqs.fail = lambda action, handle: EndpointConnectionError(endpoint_url="x")
    for _ in range(6):
        bench.turn(10)
    assert lease.state is State.LOST
    assert bench.freed == ["h0"]
    assert bench.keeper.memory.times_given_back("m") == 1, "no attempt"
    bench.sqs.fail = lambda action, handle: None
    again = bench.lease(message_id="m")
    assert again.state is State.HELD


@pytest.mark.parametrize(("seconds", "state"), [(29, State.HELD), (30, State.LOST)])
def test_a_task_does_not_start_in_a_worker_that_was_stopped_for_too_long(bench, seconds, state):
    """It goes on (``docker unpause``) before the keeper has noticed that the hold ran out."""
    lease, told = bench.lease(message_id="m"), []
    lease.on_lost = lambda: told.append("lost")
    bench.now += seconds
    assert may_start(lease) is (state is State.HELD)
    assert lease.state is state
    assert len(told) == bench.keeper.memory.times_given_back("m") == (state is State.LOST)


def test_a_run_whose_message_came_back_after_its_loss_is_not_run_beside_itself(bench):
    lease = bench.lease(message_id="m")
    lease.handed_to_pool = lambda: True
    bench.sqs.fail = lambda action, handle: "ReceiptHandleIsInvalid" if handle == "h0" else None
    bench.turn(10)
    assert lease.state is State.LOST
    assert bench.keeper.recognise(bench.lease(message_id="m"))
    assert lease.done()
    bench.turn(0.1)
    assert bench.sqs.asked(DELETE) == [[("h1", None)]]
    assert sorted(bench.freed) == ["h0", "h1"]


def test_what_is_lost_and_ends_well_is_deleted_when_it_comes_back(bench):
    lease = bench.lease(message_id="m")
    lease.handed_to_pool = lambda: True
    bench.sqs.fail = lambda action, handle: "ReceiptHandleIsInvalid"
    bench.turn(10)
    assert not lease.done()
    bench.sqs.fail = lambda action, handle: None
    assert bench.keeper.recognise(bench.lease(message_id="m"))
    bench.turn(0.1)
    assert bench.sqs.asked(DELETE) == [[("h1", None)]]


def test_a_run_of_thirteen_hours_is_deleted_and_not_run_again(bench):
    lease, told = bench.lease(message_id="m"), []
    lease.handed_to_pool = lambda: True
    lease.on_lost = lambda: told.append("lost")
    for _ in range(13 * 120):
        bench.turn(30)
    assert (lease.state, told) == (State.HELD, ["lost"])
    assert lease.done()
    bench.turn(0.1)
    assert bench.sqs.asked(DELETE) == [[("h0", None)]]
    assert bench.keeper.recognise(bench.lease(message_id="m"))


# Faults of a whole worker


def test_credentials_that_expire_are_replaced_for_messages_of_any_age(bench):
    """STS tokens live for 15 minutes; the message may have been received with an earlier one."""
    expired, fresh = FakeSQS(), bench.sqs
    expired.fail = lambda action, what: ClientError({"Error": {"Code": "ExpiredToken"}}, action)
    clients = [expired]
    calls = Calls(lambda: clients[-1], URL, refresh=lambda: clients.append(fresh))
    done, held = bench.lease(calls=calls), bench.lease(calls=calls)
    done.done()
    bench.turn(0.2)
    bench.turn(10)
    assert fresh.asked(DELETE) == [[("h0", None)]]
    assert fresh.asked(HIDE)[0] == [("h1", 30)]
    assert held.state is State.HELD
    assert not held.may_be_lost


def test_credentials_that_stay_expired_for_a_while_cost_no_lease(bench):
    broken = [True]

    def fail(action, what):
        return ClientError({"Error": {"Code": "ExpiredToken"}}, action) if broken else None

    bench.sqs.fail = fail
    leases = [bench.lease() for _ in range(5)]
    bench.turn(15)
    broken.clear()
    bench.turn(3)
    assert not any(lease.may_be_lost for lease in leases)


def test_a_denied_renewal_costs_few_calls(bench):
    """0.1 made 32 million requests a month for 40 leases."""
    bench.sqs.fail = lambda action, handle: "AccessDenied" if action == HIDE else None
    for _ in range(40):
        bench.lease()
    for _ in range(6_000):
        bench.turn(0.1)
    assert len(bench.sqs.asked(HIDE)) < 30


def test_a_call_that_fails_for_one_of_its_entries_is_made_for_each_alone(bench):
    def fail(action, handle):
        too_many = len(bench.sqs.calls[-1][1]) > 1
        return (
            ClientError({"Error": {"Code": "InvalidParameterValue"}}, action) if too_many else None
        )

    bench.sqs.fail = fail
    for _ in range(3):
        bench.lease().done()
    for _ in range(5):
        bench.turn(0.1)
    assert [len(entries) for entries in bench.sqs.asked(DELETE)] == [3, 1, 1, 1]


def test_one_entry_that_is_refused_holds_up_no_other(bench):
    bench.sqs.fail = lambda action, handle: "KmsDisabled" if handle == "h0" else None
    bench.lease().done()
    bench.turn(0.1)
    for n in range(1, 20):
        bench.lease().done()
        bench.turn(0.1)
        assert (f"h{n}", None) in bench.sqs.asked(DELETE)[-1]


def test_a_visibility_timeout_of_zero_is_no_loss(bench):
    """Whoever receives from such a queue asks for 30 seconds."""
    lease, told = bench.lease(replace(QUEUE, visibility_timeout_seconds=0)), []
    lease.on_lost = lambda: told.append("lost")
    bench.turn(0.1)
    lease.defer(600)
    bench.turn(0.1)
    assert told == []
    assert bench.sqs.asked(HIDE) == [[("h0", 600)]]


def test_a_queue_that_hangs_holds_up_no_other(bench):
    hung, healthy = replace(QUEUE, url=URL + "A"), replace(QUEUE, url=URL + "B")
    release, renewed = threading.Event(), threading.Event()
    slow, fast = FakeSQS(), FakeSQS()
    slow.during_call = lambda action: release.wait(20)
    fast.during_call = lambda action: renewed.set() if action == HIDE else None
    keeper = bench.keeper = Keeper()
    for _ in range(50):
        bench.lease(hung, calls=Calls(slow, hung.url), received_at=keeper.clock() - 11)
        bench.lease(hung, calls=Calls(slow, hung.url), received_at=keeper.clock()).done()
    keeper.start()
    try:
        bench.lease(healthy, calls=Calls(fast, healthy.url), received_at=keeper.clock() - 11)
        assert renewed.wait(5)
        eventually(lambda: slow.asked(HIDE))
        assert len(slow.asked(HIDE)) == 1, "one call about visibility at a time: the fence"
    finally:
        release.set()
        keeper.stop(timeout_seconds=10)
    assert keeper.waiting == 0


def test_a_queue_that_takes_no_deletes_stops_the_polling_of_no_other(bench):
    stuck, healthy = replace(QUEUE, url=URL + "A"), replace(QUEUE, url=URL + "B")
    for _ in range(1_001):
        bench.lease(stuck).done()
    bench.lease(healthy).done()
    assert bench.keeper.is_behind(stuck.url)
    assert not bench.keeper.is_behind(healthy.url)
    bench.turn(1)
    assert not bench.keeper.is_behind(stuck.url)


def test_a_message_that_is_lost_before_its_task_was_started_has_not_run(bench):
    bench.sqs.fail = lambda action, handle: "ReceiptHandleIsInvalid" if action == HIDE else None
    waiting = bench.lease(message_id="waiting")
    running = bench.lease(message_id="running")
    running.handed_to_pool = lambda: True
    bench.turn(11)
    assert waiting.state is running.state is State.LOST
    assert bench.keeper.memory.times_given_back("waiting") == 1
    assert bench.keeper.memory.times_given_back("running") == 0


def test_a_receive_of_a_message_that_runs_already_is_no_attempt(bench):
    running = bench.lease(message_id="m")
    running.handed_to_pool = lambda: True
    bench.lease(message_id="m")
    assert bench.keeper.memory.times_given_back("m") == 1


def test_a_thread_that_cannot_be_started_stops_no_settlement(bench, monkeypatch):
    start, deleted = threading.Thread.start, threading.Event()

    def has_no_thread_left(thread):
        raise RuntimeError("can't start new thread")

    bench.sqs.during_call = lambda action: deleted.set()
    keeper = bench.keeper = Keeper()
    keeper.start()
    try:
        monkeypatch.setattr(threading.Thread, "start", has_no_thread_left)
        for _ in range(3):
            deleted.clear()
            bench.lease(received_at=keeper.clock()).done()
            assert deleted.wait(5)
    finally:
        monkeypatch.setattr(threading.Thread, "start", start)
        keeper.stop(timeout_seconds=10)
    assert keeper.waiting == 0


def test_somebody_who_cannot_be_told_of_a_loss_stops_no_settlement(bench):
    def has_no_thread_left():
        raise RuntimeError("can't start new thread")

    old = bench.lease(received_at=bench.now - 43_200 + 70)
    old.handed_to_pool = lambda: True
    old.on_lost = has_no_thread_left
    bench.turn(40)
    bench.lease().done()
    bench.turn(1)
    assert len(bench.sqs.asked(DELETE)) == 1


# Stopping


def test_stopping_gives_back_what_is_held_and_sends_what_waits(bench):
    bench.keeper = keeper = Keeper(clock=lambda: bench.now)
    done, held = bench.lease(), bench.lease()
    done.done()
    keeper.start()
    keeper.stop(timeout_seconds=10)
    assert held.state is State.RELEASED
    assert sorted(bench.sqs.calls) == [(HIDE, [("h1", 0)]), (DELETE, [("h0", None)])]


def test_stopping_says_what_it_could_not_send(bench, caplog):
    bench.keeper = keeper = Keeper(clock=lambda: bench.now)
    bench.sqs.fail = lambda action, handle: EndpointConnectionError(endpoint_url="x")
    bench.lease().done()
    keeper.start()
    keeper.stop(timeout_seconds=0.3)
    assert "1 settled message(s)" in caplog.text


# What the machine, or an app's own code, fails at


def test_a_keeper_outlives_a_moment_without_threads(bench, monkeypatch):
    keeper, start = Keeper(linger_seconds=0.0), threading.Thread.start
    bench.keeper, refused = keeper, threading.Event()
    bench.now = keeper.clock()
    keeper.start()

    def refuse(thread):
        refused.set()
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        patch.setattr(threads, "_idle", deque())
        bench.lease().done()
        assert refused.wait(5)
    assert threading.Thread.start is start
    bench.lease().done()
    keeper.stop(5)
    assert keeper.waiting == 0
    assert sum(map(len, bench.sqs.asked(DELETE))) == 2


def test_a_keeper_that_could_not_be_started_can_be_stopped(monkeypatch):
    keeper = Keeper()
    monkeypatch.setattr(threading.Thread, "start", _raise_runtime_error)
    with pytest.raises(RuntimeError):
        keeper.start()
    keeper.stop(0.1)


def _raise_runtime_error(*_):
    raise RuntimeError("can't start new thread")


def test_whoever_cannot_be_told_of_a_loss_keeps_no_place_in_the_prefetch_window(bench):
    leases = [bench.lease() for _ in range(3)]
    leases[0].on_lost = _raise_runtime_error
    bench.sqs.fail = lambda action, handle: "ReceiptHandleIsInvalid"
    bench.turn(11)
    assert [lease.state for lease in leases] == [State.LOST] * 3
    assert bench.freed == ["h0", "h1", "h2"]


def test_a_twelve_hours_that_cannot_be_told_leaves_the_keeper_running(bench):
    lease = bench.lease()
    lease.handed_to_pool = lambda: True
    lease.on_lost = _raise_runtime_error
    for _ in range(13 * 360):
        bench.turn(10)
    other = bench.lease()
    other.done()
    bench.turn(1)
    assert bench.sqs.asked(DELETE) == [[("h1", None)]]


def test_a_lost_message_that_is_received_again_at_that_moment_is_renewed(bench, monkeypatch):
    lease = bench.lease(message_id="m")

    def receive_again(*_, **__):
        bench.sqs.fail = lambda action, handle: None
        bench.lease(message_id="m")

    bench.sqs.fail = lambda action, handle: "ReceiptHandleIsInvalid"
    monkeypatch.setattr("celery_sqs_backoff.observe.log_lines.logger.log", receive_again)
    bench.turn(11)
    assert lease.state is State.HELD
    bench.sqs.calls.clear()
    bench.turn(11)
    assert bench.sqs.asked(HIDE) == [[("h1", 30)]]
