"""The settlement table: the worker's leases, and the calls to SQS that are due for them."""

from __future__ import annotations

import gc
import math
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import celery_sqs_backoff
from celery_sqs_backoff.observe.events import MessageHidden, Settled, SettlementFailed
from celery_sqs_backoff.sqs.dead_letter import DeadLetterRecord
from celery_sqs_backoff.sqs.delivery import Delivery
from celery_sqs_backoff.sqs.errors import Failure, Kind, Operation
from celery_sqs_backoff.sqs.hidden import Hidden, Recall
from celery_sqs_backoff.sqs.queues import Queue
from celery_sqs_backoff.worker.lease import TRANSITIONS, Lease, State
from celery_sqs_backoff.worker.settlement import Agenda, SettlementTable

QUEUE = Queue("https://sqs.example/1/q", visibility_timeout_seconds=30)
VOID = Failure(Kind.STALE_HANDLE, "ReceiptHandleIsInvalid")
NO_RESPONSE = Failure(Kind.IN_DOUBT, "ReadTimeoutError", is_of_call=True)
THROTTLED = Failure(Kind.THROTTLED, "RequestThrottled", is_of_call=True)


class Table(SettlementTable):
    """A table with a clock that the test moves. ``told`` has the events that observers got."""

    def __init__(self, *, linger_seconds: float = 0) -> None:
        self.now = 0.0
        super().__init__(
            clock=lambda: self.now, linger_seconds=linger_seconds, rng=random.Random(1)
        )
        self.told = []
        self.events.subscribe(self._note_told)

    def _note_told(self, event):
        if not isinstance(event, Settled | MessageHidden):
            self.told.append(type(event))

    def receive(self, message_id="m", handle="h", *, queue=QUEUE, **facts):
        lease = make_lease(queue, message_id, handle, self, **facts)
        self.hold(lease)
        return lease

    def answer_all(self, now):
        """Make every call that is due, as if SQS accepted it. Return the number of calls."""
        self.now = now
        calls = 0
        while (call := self.next_call()) is not None:
            calls += 1
            self.enter(call, [None] * len(call.entries))
        return calls

    def calls_due(self, now):
        """Take the calls that are due, and return them by operation."""
        self.now = now
        return {call.lane.operation: call for call in iter(self.next_call, None)}


def make_lease(queue, message_id, handle, table, **facts):
    return Lease(
        queue=queue,
        calls=None,
        message={"ReceiptHandle": handle},
        body="",
        delivery=Delivery(message_id, queue.url, 0.0),
        received_at=0.0 if table is None else table.now,
        keeper=table,
        **facts,
    )


def hold_messages(count):
    table = Table(linger_seconds=0.1)
    for n in range(count):
        table.receive(f"m{n}", f"h{n}")
    return table


def cpu_seconds_to_renew(count):
    table = hold_messages(count)
    gc.disable()  # a collection would take long, because pytest holds many objects
    try:
        began = time.process_time()
        assert table.answer_all(10.0) == count // 10
        seconds = time.process_time() - began
    finally:
        gc.enable()
    assert table.told == []
    return seconds


def test_cost_of_renewals():
    """The CPU time to renew messages grows about as fast as their number.

    The test compares the times for two numbers of messages. Their ratio does not depend on the
    machine's speed.
    """
    few = min(cpu_seconds_to_renew(5_000) for _ in range(3))
    assert cpu_seconds_to_renew(50_000) < 30 * few


def test_calls_of_renewals():
    """With many messages, each renewal asks for a longer time, so that there are few calls."""
    table = hold_messages(5_000)
    calls = sum(table.answer_all(float(second)) for second in range(1, 301))
    assert table.told == []
    assert calls < 7_000, "expected about 20 calls a second. Short renewals would need 50"


def test_settled_is_forgotten():
    """The table forgets messages that are settled.

    This also holds if the next renewal is hours away, as with a visibility timeout of 12 hours.
    """
    table = Table(linger_seconds=0.1)
    queue = Queue("https://sqs.example/1/long", visibility_timeout_seconds=43_200)
    table.receive("runs for hours", queue=queue)
    for n in range(10_000):
        table.receive(f"m{n}", f"h{n}", queue=queue).defer(60)
        table.receive(f"n{n}", f"h{n}").done()
        table.answer_all(table.now + 0.001)
    table.answer_all(table.now + 1)
    assert ([lease.message_id for lease in table.held()], table.waiting) == (["runs for hours"], 0)
    lanes = table._lanes.values()
    assert sum(len(lane.renewals.heap) + len(lane.settling.heap) for lane in lanes) < 400
    assert len(table._holds.heap) < 200
    table.answer_all(100)
    assert table.next_at() == 14_400


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=60), st.floats(0, 100))
def test_agenda(items, now):
    """An agenda returns the leases that are due and not cancelled, in the order of their times."""
    agenda = Agenda()
    leases = [make_lease(QUEUE, str(n), "h", None) for n in range(len(items))]
    for lease, (at, _) in zip(leases, items, strict=True):
        agenda.put(lease, at)
    for lease, (_, is_cancelled) in zip(leases, items, strict=True):
        if is_cancelled:
            agenda.pop(lease, None)
    expected = [n for n, (at, is_cancelled) in enumerate(items) if at <= now and not is_cancelled]
    in_order = [leases[n] for n in sorted(expected, key=lambda n: (items[n][0], n))]
    assert agenda.take(now, 100) == in_order
    later = [at for at, is_cancelled in items if at > now and not is_cancelled]
    assert len(agenda) == len(later)
    assert agenda.first_at() == min(later, default=math.inf)


def test_receive_timeout_of_many() -> None:
    """A worker that holds thousands of messages receives more with a longer visibility timeout.

    Otherwise their first renewals, 30 s after the receive, would be too many to come in time.
    """
    table = Table()
    assert table.seconds_to_receive_for(QUEUE) == 30
    for n in range(10_000):
        seconds = table.seconds_to_receive_for(QUEUE)
        assert table.receive(f"m{n}", hidden_seconds=seconds).visible_at == seconds
    assert table.seconds_to_receive_for(QUEUE) == 150


def test_delay_too_long() -> None:
    """If SQS refuses even a delay of one second as too long, the table pauses between its tries.

    moto counts the 12 hours since the message was sent, so it refuses an old message any delay.
    """
    table, calls = Table(), 0
    lease = table.receive()
    table.now = 1.0
    lease.defer(599)
    while (call := table.next_call()) is not None and calls < 100:
        calls += 1
        table.enter(call, [Failure(Kind.TOO_LONG, "InvalidParameterValue")])
    assert calls < 20
    assert table.now < table.next_at() <= lease.visible_at


# One batch of dead letters becomes two calls to SQS if it is too long for one call


def settle_as_dead_letters(count):
    table = Table()
    for n in range(count):
        table.settle(table.receive(f"m{n}", f"h{n}"), State.DEAD_LETTER)
    return table


def take_sends(table, now):
    """Take the calls that are due. Return the sends of dead letters, and make the other calls."""
    table.now, calls = now, []
    while (call := table.next_call()) is not None:
        if call.lane.operation is Operation.SEND:
            calls.append(call)
        else:
            table.enter(call, [None] * len(call.entries))
    return calls


REFUSED_FOR_ONE = Failure(Kind.BAD_ENTRY, "InvalidParameterValue", is_of_call=True)


@pytest.mark.parametrize("refused", [("m0", "m1"), ("m2", "m3")], ids=["first", "second"])
def test_one_of_two_sends_refused(refused) -> None:
    """If a batch of dead letters takes two calls, the table repeats only the call that failed.

    Otherwise SQS would get some dead letters twice, or a refused one would lose its record.
    """
    table = settle_as_dead_letters(4)
    sent = []
    while calls := take_sends(table, 0.0):
        [call] = calls
        ids = [entry.lease.message_id for entry in call.entries]
        is_alone = len(ids) == 1
        results = [REFUSED_FOR_ONE if id_ in refused and not is_alone else None for id_ in ids]
        sent += [id_ for id_, result in zip(ids, results, strict=True) if result is None]
        table.enter(call, results)
    assert sorted(sent) == ["m0", "m1", "m2", "m3"]


def test_second_send_throttled() -> None:
    """If SQS throttles the second of two calls with dead letters, the table repeats it later."""
    table = settle_as_dead_letters(4)
    [call] = take_sends(table, 0.0)
    table.enter(call, [None, None, THROTTLED, THROTTLED])
    assert take_sends(table, 0.0) == []
    [call] = take_sends(table, 10.0)
    assert [entry.lease.message_id for entry in call.entries] == ["m2", "m3"]


# Deletes of messages that another worker may have received


def test_late_delete_in_doubt() -> None:
    """If SQS refuses the receipt handle in a late repetition of a delete, the delete has failed.

    Another worker may have the message by then.
    """
    table = Table()
    table.receive().done()
    table.enter(table.next_call(), [NO_RESPONSE])
    table.now = 40.0
    while (call := table.next_call()).lane.operation is not Operation.DELETE:
        table.enter(call, [NO_RESPONSE])
    table.enter(call, [VOID])
    assert table.told == [SettlementFailed]


@pytest.mark.parametrize("want", [State.DELETE, State.DEAD_LETTER])
def test_renewal_crosses_delete(want) -> None:
    """Observers get no event if SQS refuses a renewal because it has just deleted the message.

    The response to the renewal comes before the response to the delete.
    """
    table = Table()
    lease = table.receive()
    table.settle(lease, want)
    if want is State.DEAD_LETTER:
        table.enter(table.calls_due(1.0)[Operation.SEND], [None])
    calls = table.calls_due(lease.renew_at)
    table.enter(calls[Operation.CHANGE_VISIBILITY], [VOID])
    table.enter(calls[Operation.DELETE], [None])
    assert (table.told, len(table._leases), table.waiting) == ([], 0, 0)


def test_dead_letter_of_lost_message() -> None:
    """The table sends no dead letter of a message that another worker has received."""
    table = Table()
    lease = table.receive()
    table.settle(lease, State.DEAD_LETTER)
    denied = Failure(Kind.DENIED, "AccessDenied")
    table.enter(table.calls_due(9.0)[Operation.SEND], [denied])
    table.told.clear()
    table.enter(table.calls_due(lease.renew_at)[Operation.CHANGE_VISIBILITY], [VOID])
    assert (table.told, len(table._leases), table.waiting) == ([SettlementFailed], 0, 0)


def test_dead_letter_already_sent():
    """If a message comes back after its dead letter was sent, it is deleted and not sent again.

    It comes back because SQS refused a renewal while the dead letter was under way.
    """
    table, queue = Table(), replace(QUEUE, dlq_arn="arn:aws:sqs:eu-west-1:1:dead")
    lease = table.receive(queue=queue)
    facts = {"first_received_at": 0.0, "failed_at": 0.0, "origin": "q", "worker": "w"}
    record = DeadLetterRecord(task="t", id="i", reason="r", outcome=None, attempts=1, **facts)
    table.settle(lease, State.DEAD_LETTER, record=record)
    send = table.calls_due(9.0)[Operation.SEND]
    table.enter(table.calls_due(lease.renew_at)[Operation.CHANGE_VISIBILITY], [VOID])
    table.enter(send, [None])
    assert table.receive("m", "newer", queue=queue).state is State.DELETE


@pytest.mark.parametrize("want", [State.DELETE, State.DEAD_LETTER])
@pytest.mark.parametrize(("failures", "seconds"), [(3, 30), (4, 60), (20, 900)])
def test_hold_during_failures(want, failures, seconds) -> None:
    """The table hides a message for longer only if its delete has failed more than three times.

    If the worker is killed after a few failures, its message still comes back soon.
    """
    table = Table()
    lease = table.receive()
    table.settle(lease, want)
    while lease.failures < failures:
        for call in table.calls_due(max(table.now, table.next_at())).values():
            is_renewal = call.lane.operation is Operation.CHANGE_VISIBILITY
            table.enter(call, [None if is_renewal else THROTTLED])
    assert lease.seconds_to_renew(table.now, 0) == seconds


def test_transitions():
    """Each state of a lease can be reached and left. A transition outside of the table fails.

    The diagram in the docs comes from the same table.
    """
    assert set(TRANSITIONS) == set(State)
    reached = {to for transitions in TRANSITIONS.values() for to in transitions}
    assert reached == {None, *State}
    with pytest.raises(AssertionError):
        make_lease(QUEUE, "m", "h", None).move(State.HIDDEN)


def test_callers_of_change_visibility():
    """In the worker, only the keeper changes the visibility of messages, for the settlement table.

    Another call could make a message visible that was received again. The redrive has a table of
    its own.
    """
    package = Path(celery_sqs_backoff.__file__).parent
    callers = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if ".change_visibility(" in path.read_text()
    }
    # The doctor calls with an invalid receipt handle, to find out whether it has the permission.
    assert {name for name in callers if not name.startswith("redrive/")} == {
        "worker/keeper.py",
        "doctor/look.py",
    }


# Hidden messages. To bring a message forward is to let SQS show it before its delay is over


def hidden_table(count):
    """Return a table with messages that are hidden for 600 s and may be brought forward."""
    table, hidden = Table(), Hidden()
    leases = [
        table.receive(f"m{n}", f"h{n}", recall=Recall(hidden, receives=n)) for n in range(count)
    ]
    for lease in leases:
        lease.defer(600)
    table.answer_all(0.0)
    assert (len(hidden), table.waiting) == (count, 0)
    return table, hidden, leases


def test_calls_while_hidden():
    """A hidden message needs no call, and the table forgets it shortly before it is due."""
    table, hidden, _ = hidden_table(3)
    assert table.answer_all(594.0) == 0
    assert len(hidden) == 3
    assert table.answer_all(595.1) == 0
    assert (len(table._leases), len(hidden)) == (0, 0)


@pytest.mark.parametrize(("due_at", "seconds"), [(100.0, 0), (190.0, 90)])
def test_bring_forward(due_at, seconds):
    """The table brings a hidden message forward once, to the time that the caller gives."""
    table, hidden, leases = hidden_table(2)
    table.now = 100.0
    for _ in range(2):
        table.bring_forward([(leases[0], due_at)])
    assert table.room_to_bring_forward(5) == 4
    call = table.next_call()
    assert [(entry.handle, entry.seconds) for entry in call.entries] == [("h0", seconds)]
    table.enter(call, [None])
    assert (len(table._leases), len(hidden), table.waiting) == (1, 1, 0)
    assert table.room_to_bring_forward(5) == 5


def test_bring_forward_while_failing():
    """After a failed call, the table brings no message forward until a call has succeeded."""
    table, _, leases = hidden_table(3)
    table.now = 100.0
    table.bring_forward([(leases[0], 100.0)])
    table.enter(table.next_call(), [THROTTLED])
    assert table.room_to_bring_forward(5) == 0
    assert table.answer_all(110.0) == 1
    assert table.room_to_bring_forward(5) == 5


def test_bring_forward_after_failure():
    """If a failed call is not repeated, the table brings only one message forward for a minute.

    No further call about visibility is due, so no call can show that SQS works again.
    """
    table, _, _ = hidden_table(1)
    lease = table.receive("held", "h")
    table.now = 15.0
    call = table.next_call()
    lease.done()
    table.enter(call, [THROTTLED])
    table.answer_all(16.0)
    assert table.room_to_bring_forward(5) == 1
    table.now = 90.0
    assert table.room_to_bring_forward(5) == 5


def test_not_before():
    """The search for hidden messages does not even look at messages that must not run yet."""
    hidden = Hidden()
    for n in range(100):
        hidden.add(n, 900.0, Recall(hidden, not_before=500.0), 0.0)
    hidden.add("may run", 800.0, Recall(hidden), 0.0)
    assert hidden.furthest(5, 0.0) == ["may run"]
    assert len(hidden._furthest) == 1
    assert hidden.furthest(2, 500.0) == [0, 1]


def test_furthest_first():
    """The message that is hidden longest comes forward first. The table keeps at most ``most``."""
    hidden = Hidden(most=3)
    recall = Recall(hidden)
    for n in (2, 1, 3, 4):
        hidden.add(n, 100.0 * n, recall, 0.0)
    assert hidden.furthest(2, 0.0) == [3, 2]
    hidden.discard(3)
    assert hidden.furthest(5, 0.0) == [2, 1]
    assert hidden.furthest(5, 96.0) == [2], "the other message may become visible by itself"
    assert hidden.add(5, 30.0, Recall(hidden, not_before=26.0), 0.0) is None
