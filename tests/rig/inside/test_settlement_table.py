"""The settlement table by itself: what costs how much, its agenda, and what is hidden."""

from __future__ import annotations

import gc
import math
import random
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import celery_sqs_backoff
from celery_sqs_backoff.observe.events import SettlementFailed
from celery_sqs_backoff.sqs.delivery import Delivery
from celery_sqs_backoff.sqs.errors import Failure, Kind, Operation
from celery_sqs_backoff.sqs.hidden import Hidden, Recall
from celery_sqs_backoff.sqs.queues import Queue
from celery_sqs_backoff.worker.lease import TRANSITIONS, Lease, State
from celery_sqs_backoff.worker.settlement import Agenda, SettlementTable

QUEUE = Queue("https://sqs.example/1/q", visibility_timeout_seconds=30)


def make_lease(queue, message_id, handle, at, **facts) -> Lease:
    return Lease(
        queue=queue,
        calls=None,
        message={"ReceiptHandle": handle},
        body="",
        delivery=Delivery(message_id, queue.url, 0.0),
        received_at=at,
        keeper=None,
        **facts,
    )


def a_table_that_holds(count, now=0.0):
    table = SettlementTable(rng=random.Random(1))
    for n in range(count):
        table.received(make_lease(QUEUE, f"m{n}", f"h{n}", now), now)
    return table


def answer_all(table, now):
    """Make every call that is due, all of them successfully; return how many there were."""
    calls = 0
    while (call := table.take(now)) is not None:
        calls += 1
        table.answered(call, [None] * len(call.entries), now)
    return calls


def cpu_seconds_to_renew(count):
    table = a_table_that_holds(count)
    gc.disable()  # it would walk through all that pytest holds
    try:
        began = time.process_time()
        assert answer_all(table, 10.0) == count // 10
        seconds = time.process_time() - began
    finally:
        gc.enable()
    assert table.drain() == ([], [])
    return seconds


def test_ten_times_as_many_held_messages_cost_about_ten_times_as_much():
    """0.1 took 56 s for 50,000: a hundred times as much. A ratio holds on a slow machine too."""
    few = min(cpu_seconds_to_renew(5_000) for _ in range(3))
    assert cpu_seconds_to_renew(50_000) < 30 * few


def test_many_held_messages_are_renewed_for_longer_so_that_the_calls_stay_few():
    table, calls = a_table_that_holds(5_000), 0
    for second in range(1, 301):
        calls += answer_all(table, float(second))
    assert table.drain() == ([], [])
    assert calls < 7_000, "about 20 a second; 50 without"


def test_what_was_settled_leaves_nothing_behind():
    table, now = SettlementTable(), 0.0
    for n in range(20_000):
        now += 0.001
        lease = make_lease(QUEUE, f"m{n}", f"h{n}", now)
        table.received(lease, now)
        lease.become(State.DELETE)
        table.settled(lease, now)
        answer_all(table, now)
        table.drain()
    answer_all(table, now + 1)
    assert (len(table), table.waiting) == (0, 0)
    assert sum(len(lane.renewals.heap) for lane in table._lanes.values()) < 200


def test_beside_a_renewal_that_is_hours_away_calls_leave_nothing_behind() -> None:
    """A visibility timeout of 12 hours, as kombu's users set it: it grew by 80 bytes a call."""
    queue = Queue("https://sqs.example/1/q", visibility_timeout_seconds=43_200)
    table, now = SettlementTable(), 0.0
    table.received(make_lease(queue, "runs for hours", "h", now), now)
    for n in range(2_000):
        now += 1.0
        lease = make_lease(queue, f"m{n}", f"h{n}", now)
        table.received(lease, now)
        lease.become(State.HIDE, due_at=now + 60)
        table.settled(lease, now)
        assert answer_all(table, now + 0.5) == 1
    assert sum(len(lane.settling.heap) for lane in table._lanes.values()) < 200
    assert table.next_at() == 14_400


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=60), st.floats(0, 100))
def test_an_agenda_gives_what_is_ready_and_was_not_cancelled_the_oldest_first(items, now):
    agenda = Agenda()
    leases = [make_lease(QUEUE, str(n), "h", 0.0) for n in range(len(items))]
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


def test_with_thousands_held_more_are_hidden_for_longer_from_the_start() -> None:
    """Else their first renewals, 30 s after they came, would be too many to come in time."""
    table = SettlementTable()
    assert table.seconds_to_receive_for(QUEUE) == 30
    for n in range(10_000):
        seconds = table.seconds_to_receive_for(QUEUE)
        lease = make_lease(QUEUE, f"m{n}", f"h{n}", 0.0, hidden_seconds=seconds)
        assert lease.visible_at == seconds
        table.received(lease, 0.0)
    assert table.seconds_to_receive_for(QUEUE) == 150


def test_what_is_due_at_once_does_not_wait_for_renewals_that_would_only_have_filled_a_call() -> (
    None
):
    agenda = Agenda()
    leases = [make_lease(QUEUE, str(n), "h", 0.0) for n in range(16)]
    for lease in leases[:15]:
        agenda.put(lease, 100.0)
    assert agenda.take(102.0, 10) == leases[:10]
    agenda.put(leases[15], 91.0)
    assert agenda.first_at() == 91.0
    assert agenda.take(91.0, 10) == leases[15:]


def test_a_delay_that_is_too_long_at_one_second_is_not_asked_for_without_a_pause() -> None:
    """moto counts the 12 hours since the message was sent, so it refuses an old one any delay."""
    table, now, calls = SettlementTable(linger_seconds=0), 1.0, 0
    lease = make_lease(QUEUE, "m", "h", 0.0)
    table.received(lease, 0.0)
    lease.become(State.HIDE, due_at=600.0)
    table.settled(lease, now)
    while (call := table.take(now)) is not None and calls < 100:
        calls += 1
        table.answered(call, [Failure(Kind.TOO_LONG, "InvalidParameterValue")], now)
    assert calls < 20
    assert now < table.next_at() <= lease.visible_at


# A call of the table that sends becomes two calls to SQS if its bytes are too many for one


def a_table_with_dead_letters(count):
    table = SettlementTable(linger_seconds=0, rng=random.Random(1))
    leases = [make_lease(QUEUE, f"m{n}", f"h{n}", 0.0) for n in range(count)]
    for lease in leases:
        table.received(lease, 0.0)
        lease.become(State.DEAD_LETTER)
        table.settled(lease, 0.0)
    return table, leases


def sends(table, now):
    """Take the calls that are due; return those that send."""
    calls = []
    while (call := table.take(now)) is not None:
        if call.operation is Operation.SEND:
            calls.append(call)
        else:
            table.answered(call, [None] * len(call.entries), now)
    return calls


REFUSED_FOR_ONE = Failure(Kind.BAD_ENTRY, "InvalidParameterValue", is_of_call=True)


@pytest.mark.parametrize("refused", [("m0", "m1"), ("m2", "m3")], ids=["first", "second"])
def test_of_two_calls_that_send_only_the_refused_one_is_made_again(refused) -> None:
    """What SQS has taken would be a dead letter twice; what it refused would lose its record."""
    table, _ = a_table_with_dead_letters(4)
    sent = []
    while calls := sends(table, 0.0):
        [call] = calls
        ids = [entry.lease.message_id for entry in call.entries]
        is_alone = len(ids) == 1
        results = [REFUSED_FOR_ONE if id_ in refused and not is_alone else None for id_ in ids]
        sent += [id_ for id_, result in zip(ids, results, strict=True) if result is None]
        table.answered(call, results, 0.0)
    assert sorted(sent) == ["m0", "m1", "m2", "m3"]


def test_the_second_of_two_calls_that_send_waits_when_it_is_throttled() -> None:
    table, _ = a_table_with_dead_letters(4)
    [call] = sends(table, 0.0)
    throttled = Failure(Kind.THROTTLED, "RequestThrottled", is_of_call=True)
    table.answered(call, [None, None, throttled, throttled], 0.0)
    assert sends(table, 0.0) == []
    [call] = sends(table, 10.0)
    assert [entry.lease.message_id for entry in call.entries] == ["m2", "m3"]


# A delete whose response was lost

VOID = Failure(Kind.STALE_HANDLE, "ReceiptHandleIsInvalid")
NO_RESPONSE = Failure(Kind.IN_DOUBT, "ReadTimeoutError", is_of_call=True)


def a_table_with_a_delete_in_doubt():
    table = SettlementTable(linger_seconds=0, rng=random.Random(1))
    lease = make_lease(QUEUE, "m", "h", 0.0)
    table.received(lease, 0.0)
    lease.become(State.DELETE)
    table.settled(lease, 0.0)
    table.answered(table.take(0.0), [NO_RESPONSE], 0.0)
    table.drain()
    return table


def test_a_delete_in_doubt_whose_message_somebody_else_may_have_is_too_late() -> None:
    table = a_table_with_a_delete_in_doubt()
    while (call := table.take(40.0)).operation is not Operation.DELETE:
        table.answered(call, [NO_RESPONSE], 40.0)
    table.answered(call, [VOID], 40.0)
    assert SettlementFailed in map(type, table.events)


def calls_due(table, now):
    return {call.operation: call for call in iter(lambda: table.take(now), None)}


@pytest.mark.parametrize("want", [State.DELETE, State.DEAD_LETTER])
def test_a_renewal_that_crosses_the_delete_of_its_message_is_no_news(want) -> None:
    """SQS deletes the message, then refuses to renew it; the response to the delete is later."""
    table, lease = SettlementTable(linger_seconds=0), make_lease(QUEUE, "m", "h", 0.0)
    table.received(lease, 0.0)
    lease.become(want)
    table.settled(lease, 1.0)
    if want is State.DEAD_LETTER:
        table.answered(calls_due(table, 1.0)[Operation.SEND], [None], lease.renew_at)
    calls = calls_due(table, lease.renew_at)
    table.drain()
    table.answered(calls[Operation.CHANGE_VISIBILITY], [VOID], lease.renew_at)
    assert table.drain() == ([], [])
    table.answered(calls[Operation.DELETE], [None], lease.renew_at)
    assert table.drain() == ([], [])
    assert (len(table), table.waiting) == (0, 0)


def test_a_renewal_that_is_void_after_the_hold_has_run_out_is_news() -> None:
    """Another worker may have the message: a standard queue says nothing of it at the delete."""
    table, lease = SettlementTable(linger_seconds=0), make_lease(QUEUE, "m", "h", 0.0)
    table.received(lease, 0.0)
    lease.become(State.DELETE)
    table.settled(lease, lease.visible_at)
    calls = calls_due(table, lease.visible_at)
    table.answered(calls[Operation.CHANGE_VISIBILITY], [VOID], lease.visible_at)
    assert list(map(type, table.events)) == [SettlementFailed]


def test_a_renewal_that_is_void_while_a_refused_delete_waits_ends_the_row() -> None:
    table, lease = SettlementTable(linger_seconds=0), make_lease(QUEUE, "m", "h", 0.0)
    table.received(lease, 0.0)
    lease.become(State.DELETE)
    table.settled(lease, 9.0)
    denied = Failure(Kind.DENIED, "AccessDenied")
    table.answered(calls_due(table, 9.0)[Operation.DELETE], [denied], 9.9)
    renewal = calls_due(table, lease.renew_at)[Operation.CHANGE_VISIBILITY]
    table.drain()
    table.answered(renewal, [VOID], lease.renew_at)
    assert list(map(type, table.events)) == [SettlementFailed]
    assert (len(table), table.waiting) == (0, 0)


@pytest.mark.parametrize("want", [State.DELETE, State.DEAD_LETTER])
@pytest.mark.parametrize(("failures", "seconds"), [(3, 30), (4, 60), (20, 900)])
def test_what_fails_in_passing_stays_hidden_for_no_longer(want, failures, seconds) -> None:
    """Two calls were throttled, the worker killed: the message was back after two minutes."""
    table, lease = SettlementTable(linger_seconds=0), make_lease(QUEUE, "m", "h", 0.0)
    table.received(lease, 0.0)
    lease.become(want)
    table.settled(lease, 0.0)
    throttled = Failure(Kind.THROTTLED, "RequestThrottled", is_of_call=True)
    now = 0.0
    while lease.failures < failures:
        now = max(now, table.next_at())
        for call in calls_due(table, now).values():
            is_renewal = call.operation is Operation.CHANGE_VISIBILITY
            table.answered(call, [None if is_renewal else throttled], now)
    assert lease.seconds_to_renew(now, 0) == seconds


def test_each_state_is_reached_and_left():
    """The docs draw their diagram from this table; leases go by it."""
    assert set(TRANSITIONS) == set(State)
    reached = {to for transitions in TRANSITIONS.values() for to in transitions}
    assert reached == {None, *State}
    with pytest.raises(AssertionError):
        make_lease(QUEUE, "m", "h", 0.0).move(State.HIDDEN)


def test_only_the_table_changes_the_visibility_of_messages():
    """A call beside it could end the hold of a newer receive. The redrive has its own ledger."""
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


def hidden_table(count, seconds=600.0):
    """Messages that SQS hides, and that may be brought forward."""
    table, hidden, leases = SettlementTable(linger_seconds=0), Hidden(), []
    for n in range(count):
        lease = make_lease(QUEUE, f"m{n}", f"h{n}", 0.0, recall=Recall(hidden, receives=n))
        leases.append(lease)
        table.received(lease, 0.0)
        lease.become(State.HIDE, due_at=seconds)
        table.settled(lease, 0.0)
    answer_all(table, 0.0)
    assert len(hidden) == count
    assert table.waiting == 0
    return table, hidden, leases


def test_a_hidden_message_costs_no_call_until_it_is_due():
    table, hidden, _ = hidden_table(3)
    assert answer_all(table, 594.0) == 0
    assert len(table) == 3
    assert answer_all(table, 595.1) == 0
    assert (len(table), len(hidden)) == (0, 0)


def test_a_hidden_message_is_brought_forward_once():
    table, hidden, leases = hidden_table(2)
    for _ in range(2):
        table.bring_forward(leases[0], 100.0, 100.0)
    assert table.room_to_bring_forward(5) == 4
    call = table.take(100.0)
    assert [(entry.handle, entry.seconds) for entry in call.entries] == [("h0", 0)]
    table.answered(call, [None], 100.0)
    assert (len(table), len(hidden), table.waiting) == (1, 1, 0)
    assert table.room_to_bring_forward(5) == 5


def test_a_message_that_is_brought_forward_later_is_hidden_until_then():
    table, _, leases = hidden_table(1)
    table.bring_forward(leases[0], 190.0, 100.0)
    assert [entry.seconds for entry in table.take(100.0).entries] == [90]


def test_while_calls_fail_one_message_is_brought_forward_at_a_time():
    table, _, leases = hidden_table(3)
    table.bring_forward(leases[0], 100.0, 100.0)
    throttled = Failure(Kind.THROTTLED, "Throttled", is_of_call=True)
    table.answered(table.take(100.0), [throttled], 100.0)
    assert table.room_to_bring_forward(5) == 0
    assert answer_all(table, 110.0) == 1
    assert table.room_to_bring_forward(5) == 5


def test_hidden_messages_come_forward_furthest_first_and_are_kept_up_to_a_limit():
    hidden = Hidden(most=3)
    recall = Recall(hidden)
    for n in (2, 1, 3, 4):
        hidden.add(n, 100.0 * n, recall, 0.0)
    assert hidden.furthest(2, 0.0) == [3, 2]
    hidden.discard(3)
    assert hidden.furthest(5, 0.0) == [2, 1]
    assert hidden.furthest(5, 96.0) == [2], "the hold of the other may end"
    assert hidden.add(5, 30.0, Recall(hidden, not_before=26.0), 0.0) is None
