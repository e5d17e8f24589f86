"""The worker's side of a provider: asked before a run, told at its end, recalling by SQS."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from celery_sqs_backoff import Exponential, FullJitter, Outcome, Policy, Provider, Schedule
from celery_sqs_backoff.observe.board import ProviderNow
from celery_sqs_backoff.observe.events import (
    Event,
    ProviderPaused,
    ProviderProbed,
    ProviderRecovered,
    ProviderRecovering,
    Recalled,
)
from celery_sqs_backoff.observe.events import Hidden as HiddenEvent
from celery_sqs_backoff.observe.stream import Events
from celery_sqs_backoff.observe.waiting import Waiting
from celery_sqs_backoff.provider.gate import CALM_SECONDS, Hidden, State
from celery_sqs_backoff.retry.budget import GiveUpReason
from celery_sqs_backoff.retry.decision import DeadLetter, End, Ended, Hide, Reply
from celery_sqs_backoff.retry.options import InvalidOption, Options
from celery_sqs_backoff.sqs.delivery import Delivery
from celery_sqs_backoff.sqs.errors import Failure, Kind
from celery_sqs_backoff.sqs.memory import Memory
from celery_sqs_backoff.worker import gates as gates_module
from celery_sqs_backoff.worker.gate import Gate
from celery_sqs_backoff.worker.gates import MOST_TENANTS, Gates
from celery_sqs_backoff.worker.lease import Turn

URL = "http://sqs/1/mail"


class Keeper:
    """A clock, and whom to tell of what SQS has hidden."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.on_hidden: Any = None
        self.events = Events()

    def clock(self) -> float:
        return self.now


@dataclass
class Queue:
    url: str = URL
    is_fifo: bool = False


@dataclass
class Row:
    message_id: str
    due_at: float
    in_doubt: bool = False
    queue: Queue = field(default_factory=Queue)

    may_be_lost: bool = False

    @property
    def handle(self) -> str:
        return f"handle of {self.message_id}"

    def may_be_visible(self, now: float) -> bool:
        return self.may_be_lost


class Lease:
    """What a gate sees of one."""

    def __init__(self, message_id: str, **facts: Any) -> None:
        self.queue, self.group_id, self.until = Queue(), None, None
        self.slot_at, self.keeps_place, self.turn = None, False, Turn.NONE
        self.free, self.handed_to_pool = lambda: None, lambda: False
        self.keeper = SimpleNamespace(memory=Memory())
        defaults = {"received_at": time.time(), "first_received_at": time.time()}
        self.delivery = Delivery(message_id=message_id, queue_url=URL, **defaults | facts)

    def give_back(self, *, until: float | None = None, was_due: bool = False) -> bool:
        self.until = until
        return True

    def is_settled(self) -> bool:
        return self.until is not None


class Port:
    def __init__(self) -> None:
        self.batches: list[list[tuple[str, int]]] = []
        self.failure: Failure | None = None

    def change_visibility(self, entries: list[tuple[str, int]]) -> list[Failure | None]:
        self.batches.append(list(entries))
        return [self.failure] * len(entries)


class Scene:
    def __init__(self, *, room: int = 100, **options: Any) -> None:
        self.keeper, self.port = Keeper(), Port()
        self.gates = Gates(
            self.keeper,  # type: ignore[arg-type]
            calls=lambda url: self.port,  # type: ignore[arg-type,return-value]
            room=lambda: room,
            rng=Random(1),
        )
        self.gates.stop()  # no thread: the test recalls
        self.seen: list[Event] = []
        self.keeper.events.subscribe(self.seen.append)
        self.options = Options(**{"provider": Provider("mail"), **options})
        gate = self.gates.of(self.options.provider)
        assert gate is not None
        self.gate: Gate = gate

    def run(self, name: str, ended: Ended) -> None:
        lease: Any = Lease(name)
        assert not self.gate.hides(lease, self.options)
        self.gate.ended(lease, ended)

    def outage(self) -> None:
        for i in range(6):
            self.run(f"first {i}", Ended(End.RAISED, Hide(3.0), Reply.FAILED))
        assert self.gate.core.state is State.OPEN

    def hide(
        self, name: str, *, in_doubt: bool = False, may_be_lost: bool = False, **facts: Any
    ) -> float:
        lease: Any = Lease(name, **facts)
        assert self.gate.hides(lease, self.options)
        assert lease.until is not None
        row: Any = Row(name, lease.until, in_doubt, may_be_lost=may_be_lost)
        self.gates.confirmed(row)
        return float(lease.until - self.keeper.now)

    def recover(self) -> None:
        self.keeper.now += 200.0
        self.run("probe", Ended(End.RETURNED))
        assert self.gate.core.state is State.RECOVERING


def not_before(scene: Scene) -> list[float]:
    """When the messages that the gate remembers may run."""
    return [hidden.not_before for hidden in scene.gate.core._hidden.values()]


def test_nothing_runs_while_the_provider_is_down_and_all_is_recalled_afterwards() -> None:
    scene = Scene()
    scene.outage()
    for i in range(30):
        assert scene.hide(f"m{i}") >= 1
    assert scene.gates.recall() == 0
    scene.recover()
    recalled = 0
    for _ in range(60):
        scene.keeper.now += 1.0
        recalled += scene.gates.recall()
    assert recalled == 30
    handles = [handle for batch in scene.port.batches for handle, _ in batch]
    assert sorted(handles) == sorted(f"handle of m{i}" for i in range(30))
    assert {seconds for batch in scene.port.batches for _, seconds in batch} == {0}
    assert max(map(len, scene.port.batches)) <= 10


@pytest.mark.parametrize(("most", "recalled"), [(None, 1), (8, 1), (4, 0)])
def test_probes_spare_a_message_that_has_used_up_half_of_its_receives(
    most: int | None, recalled: int
) -> None:
    scene = Scene(backoff=Exponential(base=18, cap=3600))
    scene.outage()
    assert scene.hide("m", receive_count=2, max_receive_count=most) > 100.0
    scene.keeper.now += 30.0
    assert scene.gates.recall() == recalled, "its own delay is 36 s"
    scene.keeper.now += 10.0
    assert scene.gates.recall() == 1 - recalled


def test_what_is_brought_forward_waits_no_more_whoever_receives_it() -> None:
    """Else status, metrics and alerts count it until it would have been due: for an hour."""
    scene, waiting = Scene(), Waiting(clock=lambda: 0.0)
    scene.keeper.events.subscribe(waiting)
    scene.outage()
    for i in range(30):
        seconds = scene.hide(f"m{i}")
        scene.keeper.events.emit(HiddenEvent(queue="mail", message_id=f"m{i}", seconds=seconds))
    assert waiting.now("mail", at=0).waiting == 30
    scene.recover()
    for _ in range(60):
        scene.keeper.now += 1.0
        scene.gates.recall()
    assert waiting.now("mail", at=0).waiting == 0


def test_a_policy_that_fails_does_not_keep_messages_from_being_hidden() -> None:
    class OneDelay(Policy):
        def ceiling(self, attempt: int) -> float:
            return [10.0][attempt - 1]

    scene = Scene(backoff=OneDelay())
    scene.outage()
    assert scene.hide("m") >= 1


def test_what_waits_behind_a_slow_call_is_recalled_only_while_its_hold_is_certain() -> None:
    scene = Scene()
    scene.outage()
    scene.recover()
    now, core = scene.keeper.now, scene.gate.core
    for i in range(25):
        core.was_hidden(Hidden(f"m{i}", f"h{i}", URL, now + 61.0), now)
    core.rate.rate = 100.0

    def hangs(entries: list[tuple[str, int]]) -> list[Failure | None]:
        scene.port.batches.append(entries)
        scene.keeper.now += 30.0
        return [None] * len(entries)

    scene.port.change_visibility = hangs  # type: ignore[method-assign]
    scene.keeper.now += 1.0
    assert scene.gates.recall() == 20  # the third batch would leave when their hold ends
    assert len(scene.port.batches) == 2


@pytest.mark.parametrize(
    ("kind", "sent_again"),
    [(Kind.THROTTLED, True), (Kind.UNREACHABLE, True), (Kind.IN_DOUBT, False)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_an_sqs_that_fails_during_the_recall_costs_no_message_its_recall(
    kind: Kind, sent_again: bool
) -> None:
    """But for those in doubt, which another worker may have: one batch, and one now and then."""
    scene = Scene()
    scene.outage()
    scene.recover()
    now, core = scene.keeper.now, scene.gate.core
    for i in range(200):
        core.was_hidden(Hidden(f"m{i}", f"h{i}", URL, now + 1800.0), now)
    core.rate.rate = 50.0
    scene.port.failure = Failure(kind, "Whatever", is_of_call=True)
    for _ in range(40):
        scene.keeper.now += 0.25
        scene.gates.recall()
    failed = [handle for batch in scene.port.batches for handle, _ in batch]
    assert [len(batch) for batch in scene.port.batches[:5]] == [10, 1, 1, 1], "ten seconds"
    assert core.hidden(scene.keeper.now) == (200 if sent_again else 200 - len(failed))
    scene.port.failure = None
    scene.port.batches.clear()
    for _ in range(400):
        scene.keeper.now += 0.25
        scene.gates.recall()
    recalled = [handle for batch in scene.port.batches for handle, _ in batch]
    everything = {f"h{i}" for i in range(200)}
    assert sorted(recalled) == sorted(everything if sent_again else everything - set(failed))


def test_a_message_that_sqs_does_not_know_is_not_recalled_again() -> None:
    scene = Scene()
    scene.outage()
    scene.hide("m")
    scene.recover()
    scene.port.failure = Failure(Kind.STALE_HANDLE, "ReceiptHandleIsInvalid")
    for _ in range(40):
        scene.keeper.now += 0.25
        scene.gates.recall()
    assert len(scene.port.batches) == 1


@pytest.mark.parametrize("doubt", ["in_doubt", "may_be_lost"])
def test_what_is_in_doubt_is_not_recalled(doubt: str) -> None:
    scene = Scene()
    scene.outage()
    scene.hide("m", **{doubt: True})
    scene.recover()
    scene.keeper.now += 10.0
    assert scene.gates.recall() == 0


def test_what_somebody_else_has_hidden_is_not_remembered() -> None:
    scene = Scene()
    scene.outage()
    scene.gates.confirmed(Row("a task's ETA", 9999.0))  # type: ignore[arg-type]
    assert scene.gate.hidden == 0


def test_a_worker_that_stops_lets_what_it_has_hidden_come_back_soon(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    scene = Scene()
    scene.outage()
    for i in range(30):
        scene.hide(f"m{i}")
    scene.hide("in doubt", in_doubt=True)
    last: Any = Lease("its next receive is its last", receive_count=4, max_receive_count=5)
    assert scene.gate.hides(last, scene.options)
    scene.gates.confirmed(Row(last.delivery.message_id, last.until))  # type: ignore[arg-type]
    scene.gates.hand_over()
    entries = [entry for batch in scene.port.batches for entry in batch]
    assert sorted(handle for handle, _ in entries) == sorted(f"handle of m{i}" for i in range(30))
    assert max(seconds for _, seconds in entries) <= 4
    assert "provider_handed_over: 30 of 30" in caplog.text
    scene.gates.hand_over()
    assert len(scene.port.batches) == 3


def stopping(number: int, *, queues: str = "a") -> Scene:
    """A worker that has hidden messages for a provider that is down."""
    scene = Scene()
    scene.outage()
    now = scene.keeper.now
    for i in range(number):
        queue = queues[i % len(queues)]
        scene.gate.core.was_hidden(Hidden(f"m{i}", f"h{i}", queue, now + 3600.0), now)
    return scene


def test_a_recovery_is_seen_until_it_is_over() -> None:
    scene = Scene()
    scene.outage()
    for i in range(3):
        scene.hide(f"m{i}", in_doubt=i == 2)
    assert scene.gates.now() == [ProviderNow(provider="mail", state="paused", hidden=2)]
    scene.recover()
    assert scene.gates.now() == [
        ProviderNow(provider="mail", state="recovering", hidden=2, rate=1.0)
    ]
    for _ in range(100):
        scene.keeper.now += 1.0
        scene.gates.recall()
    told = [event for event in scene.seen if isinstance(event, ProviderRecovering)]
    assert [event.waiting for event in told] == [2, 0]
    assert scene.gates.now() == [ProviderNow(provider="mail", state="ok")]


def test_a_call_of_a_stopping_worker_is_of_one_queue_and_ten_messages_at_most() -> None:
    scene = stopping(34, queues="ab")
    scene.gates.hand_over()
    assert sorted(map(len, scene.port.batches)) == [7, 7, 10, 10]
    for batch in scene.port.batches:
        assert len({int(handle[1:]) % 2 for handle, _ in batch}) == 1


def test_a_call_that_hangs_does_not_hold_up_the_end_of_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gates_module, "HAND_OVER_SECONDS", 0.05)
    scene, may_go_on = stopping(300), threading.Event()

    def hang(entries: list[tuple[str, int]]) -> list[Failure | None]:
        scene.port.batches.append(entries)
        may_go_on.wait(60)
        return [None] * len(entries)

    scene.port.change_visibility = hang  # type: ignore[method-assign]
    scene.gates.hand_over()
    assert len(scene.port.batches) == 1
    may_go_on.set()


@pytest.mark.parametrize(("is_of_call", "calls"), [(True, 1), (False, 30)], ids=["call", "entry"])
def test_a_queue_that_is_away_is_not_called_again_and_again(is_of_call: bool, calls: int) -> None:
    scene = stopping(300)
    scene.port.failure = Failure(Kind.UNREACHABLE, "x", is_of_call=is_of_call)
    scene.gates.hand_over()
    assert len(scene.port.batches) == calls


def test_without_another_thread_nothing_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    scene = stopping(1)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    scene.gates.hand_over()
    assert scene.port.batches == []


def test_a_worker_without_hidden_messages_stops_without_a_call() -> None:
    scene = Scene()
    scene.gates.hand_over()
    assert scene.port.batches == []


@pytest.mark.parametrize(
    "ended",
    [
        Ended(End.RAISED, DeadLetter(GiveUpReason.NOT_RETRYABLE, Outcome.UNKNOWN)),
        Ended(End.RAISED, Hide(3.0, Outcome.UNKNOWN)),
        Ended(End.RETRY_ASKED, Hide(5.0, is_named=True)),
        Ended(End.RETRY_ASKED, Hide(5.0)),
        Ended(End.RETRY_ASKED),
        Ended(End.IGNORED),
        Ended(End.RAISED),
        Ended(End.PROCESS_LOST),
        Ended(End.CANCELLED),
    ],
    ids=repr,
)
def test_ends_that_say_nothing_of_the_provider_do_not_open_the_gate(ended: Ended) -> None:
    scene = Scene()
    for i in range(50):
        scene.run(f"m{i}", ended)
    assert scene.gate.core.state is State.CLOSED


@pytest.mark.parametrize(
    "word",
    [
        Hide(3.0),
        Hide(3.0, Outcome.UNKNOWN),
        DeadLetter(GiveUpReason.MAX_RETRIES, Outcome.RETRYABLE),
        DeadLetter(GiveUpReason.NOT_RETRYABLE, Outcome.UNKNOWN),
        None,
    ],
    ids=repr,
)
def test_failures_of_the_provider_open_the_gate_whatever_becomes_of_the_message(
    word: Hide | DeadLetter | None,
) -> None:
    """A 502 that leaves the call in doubt costs the message; the others must not follow it."""
    scene = Scene()
    for i in range(6):
        scene.run(f"m{i}", Ended(End.RAISED, word, Reply.FAILED))
    assert scene.gate.core.state is State.OPEN


def test_a_refusal_for_good_is_an_answer() -> None:
    """A provider that says that an address does not exist is there."""
    refused = Ended(
        End.RAISED, DeadLetter(GiveUpReason.NOT_RETRYABLE, Outcome.NOT_PROCESSED), Reply.ANSWERED
    )
    scene = Scene()
    scene.outage()
    scene.keeper.now += 200.0
    scene.run("probe", refused)
    assert scene.gate.core.state is State.RECOVERING


def test_the_last_receive_that_the_queue_allows_runs() -> None:
    scene = Scene()
    scene.outage()
    lease: Any = Lease("m", receive_count=5, max_receive_count=5)
    assert not scene.gate.hides(lease, scene.options)


def test_a_gate_hides_all_while_it_is_open_and_no_probe_is_due() -> None:
    """Then a task need not wait in Celery, for its ``rate_limit``, to be hidden."""
    scene = Scene()
    assert not scene.gate.hides_all
    scene.outage()
    assert scene.gate.hides_all
    scene.keeper.now += 60.0
    assert not scene.gate.hides_all, "what waits in Celery is no probe"


def test_a_message_on_its_last_receive_is_the_probe_if_one_is_due() -> None:
    """Else the gate stays open for good on a queue with few receives: no other message comes."""
    scene = Scene()
    scene.outage()
    scene.keeper.now += 60.0
    last: list[Any] = [Lease(f"m{i}", receive_count=3, max_receive_count=3) for i in range(2)]
    for lease in last:
        assert not scene.gate.hides(lease, scene.options)
    scene.gate.ended(last[1], Ended(End.RETURNED))
    assert scene.gate.core.state is State.OPEN, "one is the probe"
    scene.gate.ended(last[0], Ended(End.RETURNED))
    assert scene.gate.core.state is State.RECOVERING
    assert any(isinstance(event, ProviderProbed) for event in scene.seen)


def test_a_message_on_its_last_receive_waits_for_its_turn_while_the_provider_recovers() -> None:
    """A refusal would make it a dead letter."""
    scene = Scene()
    scene.outage()
    scene.recover()
    for i in range(3):
        lease: Any = Lease(f"m{i}", receive_count=3, max_receive_count=3)
        assert not scene.gate.hides(lease, scene.options)
        assert (lease.turn is Turn.IS_AWAITED) == (i > 0)
        if i:
            assert scene.gate.waits(lease, scene.options, lambda: None)
    late: Any = Lease("its time is short", first_received_at=time.time() - 129_600.0 + 50.0)
    assert not scene.gate.hides(late, scene.options)
    assert late.turn is Turn.NONE


def test_a_message_whose_retry_for_is_over_is_left_to_be_given_up() -> None:
    scene = Scene(retry_for=60.0)
    scene.outage()
    lease: Any = Lease("m", first_received_at=0.0, sent_at=0.0)
    assert not scene.gate.hides(lease, scene.options)


def test_a_hidden_message_comes_back_before_the_end_of_retry_for_and_runs() -> None:
    """The provider may be back by then; without a run it would be given up for nothing."""
    scene = Scene(retry_for=600.0)
    scene.outage()
    now = time.time()
    assert scene.hide("m") <= 540 + 1
    late: Any = Lease("late", first_received_at=now - 541.0, sent_at=now - 541.0)
    assert not scene.gate.hides(late, scene.options)
    early: Any = Lease("early", first_received_at=now - 539.0, sent_at=now - 539.0)
    assert scene.gate.hides(early, scene.options)


def test_a_message_that_sqs_is_about_to_delete_runs() -> None:
    """Hidden until the end of the retention period it would be lost."""
    scene = Scene(retry_for=None)
    scene.outage()
    sent_at = time.time() - 3600.0
    lease: Any = Lease("m", sent_at=sent_at, retention_seconds=3600 + 299)
    assert not scene.gate.hides(lease, scene.options)
    lease = Lease("m", sent_at=sent_at, retention_seconds=3600 + 320)
    assert scene.gate.hides(lease, scene.options)
    assert lease.until - scene.keeper.now <= 20


def test_a_failed_message_waits_as_long_as_the_gate_says_and_for_retry_after() -> None:
    scene = Scene(backoff=FullJitter(cap=100))
    lease: Any = Lease("m")
    ended = Ended(End.RAISED, Hide(3.0, retry_after=50.0), Reply.FAILED)
    assert scene.gate.delayed(3.0, lease, ended, scene.options) == 3.0
    scene.outage()
    assert scene.gate.delayed(3.0, lease, ended, scene.options) >= 75
    now = scene.keeper.now
    scene.gates.confirmed(Row("m", now + 99.0))  # type: ignore[arg-type]
    assert not_before(scene) == [now + 50.0]


def test_a_delay_that_the_task_has_named_is_not_cut_short() -> None:
    """``self.retry(countdown=600)``, perhaps from the provider's Retry-After."""
    scene = Scene(backoff=FullJitter(cap=100))
    lease: Any = Lease("m")
    ended = Ended(End.RETRY_ASKED, Hide(600.0, is_named=True))
    hidden_seconds = scene.gate.delayed(600.0, lease, ended, scene.options)
    now = scene.keeper.now
    scene.gates.confirmed(Row("m", now + hidden_seconds))  # type: ignore[arg-type]
    assert not_before(scene) == [now + 600.0]


def test_a_message_that_always_fails_waits_for_longer_each_time() -> None:
    """Brought forward at once each time, it would run all the time, and strangle the rate."""
    scene = Scene(backoff=FullJitter(cap=1000))
    scene.outage()
    scene.recover()
    lease: Any = Lease("m")
    ended = Ended(End.RAISED, Hide(300.0, retry_after=5.0), Reply.FAILED)
    delays = []
    for _ in range(5):
        scene.keeper.now += 1.0
        scene.gate.ended(lease, ended)
        delays.append(scene.gate.delayed(300.0, lease, ended, scene.options))
        scene.gates.confirmed(Row("m", scene.keeper.now + delays[-1]))  # type: ignore[arg-type]
        assert scene.gate.hidden == (1 if len(delays) < 3 else 0)
        assert not scene.gate.hides(lease, scene.options)
    assert delays[:2] == [5.0, 5.0], "twice may be the provider's limit"
    assert 5 <= delays[2] <= 8 <= delays[3] <= 16 <= delays[4] <= 32


@pytest.mark.parametrize(("receive_count", "seconds"), [(4, 2.0), (5, 60.0)])
def test_a_refused_message_with_few_receives_left_comes_back_later(
    receive_count: int, seconds: float
) -> None:
    """Each early return costs a receive, and the provider may refuse it again."""
    scene = Scene(backoff=FullJitter(cap=1000))
    scene.outage()
    scene.recover()
    lease: Any = Lease("m", receive_count=receive_count, max_receive_count=10)
    ended = Ended(End.RAISED, Hide(300.0), Reply.FAILED)
    scene.gate.ended(lease, ended)
    assert scene.gate.delayed(300.0, lease, ended, scene.options) == seconds


def test_a_named_delay_is_kept_while_the_provider_recovers() -> None:
    scene = Scene(backoff=FullJitter(cap=1000))
    scene.outage()
    scene.recover()
    lease: Any = Lease("m")
    ended = Ended(End.RETRY_ASKED, Hide(600.0, is_named=True))
    scene.gate.ended(lease, ended)
    assert scene.gate.delayed(600.0, lease, ended, scene.options) == 600.0


def test_a_schedule_is_recalled_only_if_asked() -> None:
    for recall, remembered in ((None, 0), (True, 1)):
        scene = Scene(backoff=Schedule([5]), provider=Provider("mail", recall=recall))
        scene.outage()
        scene.hide("m")
        assert scene.gate.hidden == remembered


def test_a_worker_without_room_recalls_nothing() -> None:
    scene = Scene(room=0)
    scene.outage()
    scene.hide("m")
    scene.recover()
    scene.keeper.now += 10.0
    assert scene.gates.recall() == 0


def paced(scene: Scene, name: str, **facts: Any) -> tuple[Any, list[str]]:
    """A message in line for a slot, and where it notes that it started."""
    lease: Any = Lease(name, **facts)
    started: list[str] = []
    assert not scene.gate.hides(lease, scene.options)
    assert scene.gate.waits(lease, scene.options, lambda: started.append(name))
    return lease, started


def step(scene: Scene) -> None:
    for action in scene.gates.pacer.step(scene.keeper.now):
        action()


def test_messages_of_a_provider_with_a_rate_start_at_their_slots() -> None:
    scene = Scene(provider=Provider("mail", rate=1.0))
    first, second = paced(scene, "a"), paced(scene, "b")
    step(scene)
    assert (first[1], second[1]) == (["a"], [])
    first[0].slot_at = None  # its task has begun
    scene.keeper.now += 1.06
    step(scene)
    assert second[1] == ["b"]
    assert not scene.gate.waits(second[0], scene.options, list), "it has its slot"
    assert not scene.gate.hides(second[0], scene.options)


def test_a_message_is_too_late_for_its_slot_once() -> None:
    """Else a loop that others' tasks block (solo, gevent) would never let it start.

    A loop that is slow for a moment does not make a second fuller than agreed.
    """
    scene = Scene(provider=Provider("mail", rate="1/m"))
    begun = []
    lease: Any = Lease("a")

    def start() -> None:
        scene.keeper.now += 0.15
        if not scene.gate.waits(lease, scene.options, start):
            begun.append(scene.keeper.now)

    assert scene.gate.waits(lease, scene.options, start)
    step(scene)
    assert (begun, lease.slot_at) == ([], None)
    step(scene)
    scene.keeper.now += 62.0
    step(scene)
    assert (begun, lease.until) == ([], None), "it waits here however far its slot is"
    scene.keeper.now += 1.05
    step(scene)
    assert len(begun) == 1
    assert not scene.gate.waits(lease, scene.options, list)


@pytest.mark.parametrize("how", ["begins", "is settled", "waits for its turn", "is hidden"])
def test_a_message_that_gives_up_its_slot_makes_room_for_the_next(how: str) -> None:
    """Else no message of its provider would start in this worker any more."""
    scene = Scene(provider=Provider("mail", rate=1.0))
    first, second = paced(scene, "a"), paced(scene, "b")
    for _ in range(3):
        step(scene)
        scene.keeper.now += 2.0
    assert (first[1], second[1]) == (["a"], []), "one second's slots"
    assert scene.gate.pace is not None
    assert scene.gate.pace.is_behind
    if how == "begins":
        first[0].slot_at = None
    elif how == "is settled":
        first[0].give_back(until=1.0)
    elif how == "is hidden":
        scene.outage()
        assert scene.gate.hides(first[0], scene.options)
    else:
        first[0].turn = Turn.IS_AWAITED
        assert scene.gate.waits(first[0], scene.options, list)
    step(scene)
    scene.keeper.now += 1.1
    step(scene)
    assert second[1] == ["b"]


def test_a_message_in_line_takes_up_room_in_a_worker_that_waits_for_processes() -> None:
    """Else it would take in the whole queue, while other workers are free."""
    scene = Scene(provider=Provider("mail", rate=1.0))
    before = [paced(scene, name)[0] for name in "ab"]
    for _ in range(3):
        step(scene)
        scene.keeper.now += 2.0
    assert not any(lease.keeps_place for lease in before)
    assert paced(scene, "c")[0].keeps_place


def test_what_waits_for_a_provider_is_counted() -> None:
    scene = Scene(provider=Provider("mail", rate="60/m"))
    for number in range(3):
        paced(scene, f"m{number}")
    assert scene.gates.now() == [ProviderNow(provider="mail", state="ok", in_line=3)]
    scene = Scene()
    scene.outage()
    scene.hide("m")
    assert scene.gates.now() == [ProviderNow(provider="mail", state="paused", hidden=1)]


def test_a_message_whose_slot_is_far_is_hidden_and_that_is_no_attempt() -> None:
    """It is back a little before its slot, 10.5 and 21.05 s away: SQS hides for whole seconds.

    Back after it, nobody used the slots of the first second in which hidden messages were due.
    """
    scene = Scene(provider=Provider("mail", rate="6/m"))
    leases = [paced(scene, f"m{i}")[0] for i in range(3)]
    step(scene)
    now = scene.keeper.now
    assert [lease.until for lease in leases] == [None, now + 10, now + 21]


def test_no_message_is_hidden_for_its_slot_on_its_last_receive() -> None:
    scene = Scene(provider=Provider("mail", rate="1/m"))
    first, _ = paced(scene, "m0")
    last, started = paced(scene, "m1", receive_count=5, max_receive_count=5)
    step(scene)
    first.slot_at = None  # its task has begun
    assert last.until is None
    scene.keeper.now += 63.2
    step(scene)
    assert started == ["m1"]


def test_a_message_whose_slot_is_after_its_budget_waits_for_it_at_its_last_look() -> None:
    scene = Scene(provider=Provider("mail", rate="1/m"), retry_for=300.0)
    now = 1_700_000_000.0
    scene.gates.today = lambda: now
    facts = {"first_received_at": now, "sent_at": now, "receive_count": 2, "received_at": now}
    leases = [paced(scene, f"m{i}", **facts)[0] for i in range(8)]
    step(scene)
    assert leases[-1].until is not None
    assert 200.0 <= leases[-1].until - scene.keeper.now < 300.0
    now += 299.0
    scene.keeper.now += 299.0
    again, _ = paced(scene, "m7", **{**facts, "receive_count": 3})
    step(scene)
    assert again.until is None


def test_a_message_that_is_given_up_needs_no_slot() -> None:
    scene = Scene(provider=Provider("mail", rate="1/m"), retry_for=60.0)
    over: Any = Lease("m", first_received_at=0.0, sent_at=0.0, receive_count=4)
    assert not scene.gate.waits(over, scene.options, list)


def test_messages_that_run_after_their_retry_for_keep_to_the_rate() -> None:
    """All that wait run once when the workers are back, if they were received a few times only."""
    scene = Scene(provider=Provider("mail", rate="1/s"), retry_for=600.0)
    facts = {"first_received_at": time.time() - 3600.0, "receive_count": 2}
    started = [paced(scene, f"m{i}", **facts)[1] for i in range(30)]
    step(scene)
    assert sum(map(bool, started)) == 1


@pytest.mark.parametrize(("rate", "starts"), [("100/s", 2), ("30/m", 1)], ids=str)
def test_a_message_starts_at_the_slower_of_what_is_agreed_and_what_the_provider_takes(
    rate: str, starts: int
) -> None:
    """A provider that recovers takes one call a second at first; it may agree to less."""
    scene = Scene(provider=Provider("mail", rate=rate))
    scene.outage()
    scene.recover()
    line = [paced(scene, f"m{i}") for i in range(2)]
    for _ in range(30):
        step(scene)
        scene.keeper.now += 0.05
    for lease, started in line:
        if started:
            lease.slot_at = None  # its task has begun
    assert sum(len(started) for _, started in line) == starts


def test_a_message_that_is_settled_while_it_waits_does_not_start() -> None:
    scene = Scene(provider=Provider("mail", rate=1.0))
    lease, started = paced(scene, "a")
    lease.give_back(until=1.0)
    step(scene)
    assert started == []


def test_a_message_with_a_slot_is_hidden_if_the_provider_has_gone_down_meanwhile() -> None:
    scene = Scene(provider=Provider("mail", rate=1000.0))
    lease, _ = paced(scene, "late")
    step(scene)
    assert lease.slot_at is not None
    scene.outage()
    assert scene.gate.hides(lease, scene.options)


def test_a_probe_needs_no_slot() -> None:
    scene = Scene(provider=Provider("mail", rate="1/h"))
    for i in range(6):
        lease: Any = Lease(f"m{i}")
        scene.gate.ended(lease, Ended(End.RAISED, Hide(3.0), Reply.FAILED))
    scene.keeper.now += 100.0
    probe: Any = Lease("probe")
    assert not scene.gate.hides(probe, scene.options)
    assert not scene.gate.waits(probe, scene.options, list)


def test_what_happens_to_a_provider_is_on_the_stream() -> None:
    scene = Scene()
    scene.outage()
    scene.hide("m")
    scene.recover()
    for _ in range(5):
        scene.keeper.now += 1.0
        scene.gates.recall()
    scene.keeper.now += CALM_SECONDS + 1
    scene.gates.recall()
    assert scene.seen == [
        ProviderPaused(provider="mail"),
        ProviderProbed(provider="mail"),
        ProviderRecovering(provider="mail", rate=1.0, waiting=1),
        Recalled(queue="mail", message_ids=("m",)),
        ProviderRecovered(provider="mail", recalled=1),
    ]


class Task:
    """What gates see of a task."""

    def __init__(self, **options: Any) -> None:
        self.backoff_options = Options(**options)

    def run(self, account: str, text: str = "") -> None: ...


def test_tenants_of_a_provider_fail_apart() -> None:
    scene = Scene()
    task = Task(provider=Provider("mail", key="account"))
    gates = [
        scene.gates.of_call(task, lambda a=account: ((a,), {}, {}))  # type: ignore[misc]
        for account in "aab"
    ]
    assert gates[0] is gates[1]
    assert gates[0] is not gates[2]


def test_no_event_tells_who_a_tenant_is() -> None:
    scene = Scene()
    task = Task(provider=Provider("mail", key="account"))
    gate = scene.gates.of_call(task, lambda: ((), {"account": "secret-account"}, {}))
    assert gate is not None
    for i in range(6):
        lease: Any = Lease(f"m{i}")
        gate.ended(lease, Ended(End.RAISED, Hide(3.0), Reply.FAILED))
    (opened,) = scene.seen
    assert isinstance(opened, ProviderPaused)
    assert opened.tenant
    assert "secret" not in repr(opened)


@pytest.mark.parametrize("payload", [None, 5, [], {"args": [1]}, ("a", {}), ([], [])], ids=repr)
def test_a_call_without_a_tenant_has_the_gate_of_the_provider(payload: object) -> None:
    scene = Scene()
    task = Task(provider=Provider("mail", key="account"))
    assert scene.gates.of_call(task, lambda: payload) is scene.gates.of("mail")


def test_tenants_are_bounded_and_those_that_fail_are_kept() -> None:
    scene = Scene()
    provider = Provider("mail", key="account")
    failing = scene.gates.of(provider, "failing")
    assert failing is not None
    for i in range(6):
        lease: Any = Lease(f"m{i}")
        failing.ended(lease, Ended(End.RAISED, Hide(3.0), Reply.FAILED))
    for i in range(MOST_TENANTS + 50):
        scene.gates.of(provider, f"tenant {i}")
    assert len(scene.gates._gates) <= MOST_TENANTS + 1  # and that of no tenant
    assert scene.gates.of(provider, "failing") is failing


def test_messages_that_other_workers_have_run_keep_no_tenant() -> None:
    """Else, one failure each, 1,000 tenants stay for ever, and all new ones share one gate."""
    provider, failed = (
        Provider("mail", key="account"),
        Ended(End.RAISED, Hide(3.0), Reply.FAILED),
    )
    scene = Scene(provider=provider)
    for i in range(MOST_TENANTS):
        gate, lease = scene.gates.of(provider, f"tenant {i}"), Lease(f"m{i}")
        assert gate is not None
        gate.ended(lease, failed)  # type: ignore[arg-type]
        gate.delayed(3.0, lease, failed, scene.options)  # type: ignore[arg-type]
        scene.gates.confirmed(Row(f"m{i}", scene.keeper.now + 60.0))  # type: ignore[arg-type]
    assert sum(one.hidden for one in scene.gates.now()) == MOST_TENANTS
    scene.keeper.now += 60.0
    assert not any(one.hidden for one in scene.gates.now()), "they have come back"
    assert scene.gates.of(provider, "new") is not scene.gates.of(provider, "another")


def test_tasks_of_one_provider_share_its_gate() -> None:
    gates = Scene().gates
    assert gates.of("sms") is gates.of("sms") is gates.of(Provider("sms"))
    assert gates.of("other") is not gates.of("sms")
    assert gates.of(None) is None


@pytest.mark.parametrize("value", ["", 5, [], object()])
def test_a_provider_that_is_none_of_ours_is_refused(value: object) -> None:
    with pytest.raises(InvalidOption, match="provider"):
        Options(provider=value)


def test_a_machine_without_threads_keeps_no_message_from_being_settled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the thread is started when there is room for it again."""
    gates = Gates(Keeper(), calls=lambda url: None, room=lambda: 1)  # type: ignore[arg-type,return-value]
    gate = gates.of(Provider("mailgun"))
    assert gate is not None
    gate.core.down_since(0.0)

    def no_room(thread: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr("threading.Thread.start", no_room)
        with gates.lock:
            gates.look_again(gate)
    assert gates._thread is None
    with gates.lock:
        gates.look_again(gate)
    assert gates._thread is not None
    gates.stop()
    gates._thread.join(10)


def test_a_probe_that_ends_before_its_run_is_replaced() -> None:
    """It is given back at a reconnect, or kept because its arguments cannot be used."""
    scene = Scene()
    scene.outage()
    scene.keeper.now += 200.0
    probe: Any = Lease("probe")
    assert not scene.gate.hides(probe, scene.options)
    probe.free()
    scene.keeper.now += 200.0
    assert not scene.gate.hides(Lease("next"), scene.options), "it is the probe now"  # type: ignore[arg-type]


def test_a_probe_that_runs_on_after_its_message_was_lost_is_waited_for() -> None:
    scene = Scene()
    scene.outage()
    scene.keeper.now += 200.0
    probe: Any = Lease("probe")
    assert not scene.gate.hides(probe, scene.options)
    probe.handed_to_pool = lambda: True
    probe.free()
    assert scene.gate.core.state is State.OPEN
    scene.gate.ended(probe, Ended(End.RETURNED))
    assert scene.gate.core.state is State.RECOVERING
