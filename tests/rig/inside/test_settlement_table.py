"""The settlement table by itself: what costs how much, its agenda, and what is hidden."""

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
    """A table with a clock that the test moves, and the news that observers were told."""

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
        """Make every call that is due, all of them successfully; return how many there were."""
        self.now = now
        calls = 0
        while (call := self.next_call()) is not None:
            calls += 1
            self.enter(call, [None] * len(call.entries))
        return calls

    def calls_due(self, now):
        """Take the calls that are due; return them by what they do."""
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
    gc.disable()  # it would walk through all that pytest holds
    try:
        began = time.process_time()
        assert table.answer_all(10.0) == count // 10
        seconds = time.process_time() - began
    finally:
        gc.enable()
    assert table.told == []
    return seconds


def test_cost_of_renewals():
    """Ten times as many held messages cost about ten times as much CPU time to renew.

    Version 0.1 took 56 s for 50,000, a hundred times as much as for 5,000. A ratio holds on a slow
    machine too.
    """
    few = min(cpu_seconds_to_renew(5_000) for _ in range(3))
    assert cpu_seconds_to_renew(50_000) < 30 * few


def test_calls_of_renewals():
    """The table renews many held messages for longer, so that the calls stay few."""
    table = hold_messages(5_000)
    calls = sum(table.answer_all(float(second)) for second in range(1, 301))
    assert table.told == []
    assert calls < 7_000, "about 20 a second; 50 without"


def test_settled_is_forgotten():
    """The table keeps nothing about settled messages.

    This holds beside a renewal that is hours away, as with a visibility timeout of 12 hours.
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
    """An agenda returns the leases that are due and were not cancelled, oldest first."""
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


# A call of the table that sends becomes two calls to SQS if its bytes are too many for one


def settle_as_dead_letters(count):
    table = Table()
    for n in range(count):
        table.settle(table.receive(f"m{n}", f"h{n}"), State.DEAD_LETTER)
    return table


def take_sends(table, now):
    """Make the calls that are due, except those that send. Return the latter."""
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
    """If a send takes two calls to SQS, the table repeats only the call that SQS refused.

    Otherwise a dead letter that SQS has taken would be there twice, or a refused one would lose its
    record.
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
    """The table waits before it repeats the second of two calls that send, if SQS throttled it."""
    table = settle_as_dead_letters(4)
    [call] = take_sends(table, 0.0)
    table.enter(call, [None, None, THROTTLED, THROTTLED])
    assert take_sends(table, 0.0) == []
    [call] = take_sends(table, 10.0)
    assert [entry.lease.message_id for entry in call.entries] == ["m2", "m3"]


# Removals whose messages somebody else may have


def test_late_delete_in_doubt() -> None:
    """A delete in doubt fails if its handle is void and another worker may have the message."""
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
    """Observers hear nothing of a refused renewal that crosses the delete of its message.

    SQS deletes the message, then refuses to renew it; the response to the delete is later.
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
    """A message that comes back after its dead letter was sent is deleted, and not sent again.

    SQS refused to renew the message while its dead letter was under way.
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
    """A message is hidden for longer only after its removal has failed more than three times.

    A worker was killed after two throttled calls, and its message came back only after two minutes.
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
    """Each state of a lease can be reached and left, and other transitions fail.

    The docs draw their diagram from this table; leases go by it.
    """
    assert set(TRANSITIONS) == set(State)
    reached = {to for transitions in TRANSITIONS.values() for to in transitions}
    assert reached == {None, *State}
    with pytest.raises(AssertionError):
        make_lease(QUEUE, "m", "h", None).move(State.HIDDEN)


def test_callers_of_change_visibility():
    """Only the settlement table changes the visibility of messages.

    A call beside it could end the hold of a newer receive. The redrive has its own ledger.
    """
    package = Path(celery_sqs_backoff.__file__).parent
    callers = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if ".change_visibility(" in path.read_text()
    }
    # The doctor asks with a receipt handle that is none, whether it has the permission.
    assert {name for name in callers if not name.startswith("redrive/")} == {
        "worker/keeper.py",
        "doctor/look.py",
    }


# Hidden messages


def hidden_table(count):
    """Messages that SQS hides for 600 s, and that may be brought forward."""
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
    """A hidden message costs no call, and the table forgets it shortly before it is due."""
    table, hidden, _ = hidden_table(3)
    assert table.answer_all(594.0) == 0
    assert len(hidden) == 3
    assert table.answer_all(595.1) == 0
    assert (len(table._leases), len(hidden)) == (0, 0)


@pytest.mark.parametrize(("due_at", "seconds"), [(100.0, 0), (190.0, 90)])
def test_bring_forward(due_at, seconds):
    """The table brings a hidden message forward once, to the time at which it is due."""
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
    """While calls fail, the table brings one message forward at a time."""
    table, _, leases = hidden_table(3)
    table.now = 100.0
    table.bring_forward([(leases[0], 100.0)])
    table.enter(table.next_call(), [THROTTLED])
    assert table.room_to_bring_forward(5) == 0
    assert table.answer_all(110.0) == 1
    assert table.room_to_bring_forward(5) == 5


def test_bring_forward_after_failure():
    """After a failed call that has no second try, recalls are slow for about a minute.

    No further call about visibility is due, so none could succeed.
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
    """The search for hidden messages does not look again at those that must not run yet."""
    hidden = Hidden()
    for n in range(100):
        hidden.add(n, 900.0, Recall(hidden, not_before=500.0), 0.0)
    hidden.add("may run", 800.0, Recall(hidden), 0.0)
    assert hidden.furthest(5, 0.0) == ["may run"]
    assert len(hidden._furthest) == 1
    assert hidden.furthest(2, 500.0) == [0, 1]


def test_furthest_first():
    """Hidden messages come forward furthest first, and only a limited number is remembered."""
    hidden = Hidden(most=3)
    recall = Recall(hidden)
    for n in (2, 1, 3, 4):
        hidden.add(n, 100.0 * n, recall, 0.0)
    assert hidden.furthest(2, 0.0) == [3, 2]
    hidden.discard(3)
    assert hidden.furthest(5, 0.0) == [2, 1]
    assert hidden.furthest(5, 96.0) == [2], "the hold of the other may end"
    assert hidden.add(5, 30.0, Recall(hidden, not_before=26.0), 0.0) is None
