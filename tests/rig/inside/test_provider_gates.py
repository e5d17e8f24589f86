"""A provider's gate in the worker decides when messages of its tasks run.

The worker asks the gate before each run, and tells it how the run ended. While the provider is
down, the gate lets the worker hide messages. Later it *recalls* them: the worker makes them visible
before they are due.
"""

from __future__ import annotations

import threading
import time
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from celery_sqs_backoff import FullJitter, Provider
from celery_sqs_backoff.observe.board import ProviderNow
from celery_sqs_backoff.observe.events import (
    OfProvider,
    ProviderPaused,
    ProviderProbed,
    ProviderRecovered,
    ProviderRecovering,
    Recalled,
    SettlementFailed,
    WorkerEvent,
)
from celery_sqs_backoff.observe.waiting import Waiting
from celery_sqs_backoff.provider.gate import CALM_SECONDS, GateState
from celery_sqs_backoff.retry.decision import End, Hide, Reply, RunEnd
from celery_sqs_backoff.retry.options import InvalidOption, Options
from celery_sqs_backoff.sqs.delivery import Delivery
from celery_sqs_backoff.sqs.errors import Failure, Kind
from celery_sqs_backoff.sqs.hidden import Recall
from celery_sqs_backoff.sqs.queues import Queue
from celery_sqs_backoff.worker import providers
from celery_sqs_backoff.worker.keeper import Keeper
from celery_sqs_backoff.worker.lease import Lease
from celery_sqs_backoff.worker.lease import State as LeaseState
from celery_sqs_backoff.worker.providers import MOST_TENANTS, Gate, Gates, introduce

QUEUE = Queue("http://sqs/1/mail", visibility_timeout_seconds=30)


class Port:
    """Takes the calls about one queue, and records each call that changes visibility."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[str, int]]] = []
        self.failure: Failure | None = None
        self.call_seconds = 0.0

    def change_visibility(self, entries: list[tuple[str, int]]) -> list[Failure | None]:
        self.batches.append(list(entries))
        return [self.failure] * len(entries)

    def delete(self, handles: list[str]) -> list[Failure | None]:
        return [None] * len(handles)


class Scene:
    """A worker's keeper and gates without threads. The test lets time pass."""

    def __init__(self, *, room: int = 100, **options: Any) -> None:
        self.now, self.port = 1000.0, Port()
        self.keeper = Keeper(linger_seconds=0, clock=lambda: self.now, rng=Random(1))
        self.gates = Gates(self.keeper, room=lambda: room, rng=Random(1))
        self.gates.pacer.stop()
        self.seen: list[WorkerEvent] = []
        self.keeper.events.subscribe(self.seen.append)
        self.options = Options(**{"provider": Provider("mail"), **options})
        gate = self.gates.of(self.options.provider)
        assert gate is not None
        self.gate: Gate = gate

    def lease(self, name: str, *, queue: Queue = QUEUE, **facts: Any) -> Lease:
        """Receive a message, and return its lease."""
        defaults = {"received_at": time.time(), "first_received_at": time.time()}
        lease = Lease(
            calls=self.port,  # type: ignore[arg-type]
            queue=queue,
            message={"ReceiptHandle": f"handle of {name}"},
            body="{}",
            delivery=Delivery(message_id=name, queue_url=queue.url, **defaults | facts),
            received_at=self.now,
            keeper=self.keeper,
            free=lambda: None,
        )
        lease.options = self.options
        self.keeper.hold(lease)
        return lease

    def run(self, name: str, ended: RunEnd) -> None:
        lease = self.lease(name)
        assert not self.gate.keeps_back(lease, self.options)
        self.gate.ended(lease, ended)
        lease.done()
        self.make_calls()

    def make_calls(self) -> list[tuple[str, int]]:
        """Make the calls that are due. Return handle and seconds of each change of visibility."""
        before = len(self.port.batches)
        while (call := self.keeper.next_call()) is not None:
            self.keeper.perform(call)
        return [entry for batch in self.port.batches[before:] for entry in batch]

    def recall(self) -> list[str]:
        """Let the gate recall messages. Return the handles of the messages that become visible."""
        self.gates.recall()
        return [handle for handle, seconds in self.make_calls() if seconds == 0]

    def outage(self) -> None:
        for i in range(6):
            self.run(f"first {i}", RunEnd(End.RAISED, Hide(3.0), Reply.FAILED))
        assert self.gate.core.state is GateState.OPEN

    def hide(self, name: str, **facts: Any) -> float:
        lease = self.lease(name, **facts)
        assert self.gate.keeps_back(lease, self.options, list)
        self.make_calls()
        return lease.due_at - self.now

    def hide_many(self, number: int) -> None:
        """Hide messages for an hour."""
        for i in range(number):
            lease = self.lease(f"m{i}")
            lease.recall = Recall(self.gate.core.hidden)
            lease.defer(3600.0)
        self.make_calls()
        self.port.batches.clear()

    def recover(self) -> None:
        self.now += 200.0
        self.run("probe", RunEnd(End.RETURNED))
        assert self.gate.core.state is GateState.RECOVERING


def test_outage_and_recovery() -> None:
    """The worker hides messages while the provider is down, and recalls them all afterwards."""
    scene = Scene()
    scene.outage()
    for i in range(30):
        assert scene.hide(f"m{i}") >= 1
    assert scene.recall() == []
    scene.recover()
    scene.port.batches.clear()
    recalled = []
    for _ in range(60):
        scene.now += 1.0
        recalled += scene.recall()
    assert sorted(recalled) == sorted(f"handle of m{i}" for i in range(30))
    assert max(map(len, scene.port.batches)) <= 10
    assert scene.keeper.waiting == 0


def test_recalled_no_longer_waits() -> None:
    """A recalled message no longer counts as waiting, whichever worker receives it.

    Otherwise status, metrics and alerts would count it until its first due time, here for an hour.
    """
    scene, waiting = Scene(), Waiting(clock=lambda: 0.0)
    scene.keeper.events.subscribe(waiting)
    scene.outage()
    for i in range(30):
        scene.hide(f"m{i}")
    assert waiting.now("mail").waiting == 30
    scene.recover()
    for _ in range(60):
        scene.now += 1.0
        scene.recall()
    assert waiting.now("mail").waiting == 0


def test_recall_behind_slow_call() -> None:
    """The worker recalls a message only while it is sure that SQS still hides it.

    A slow call delays the batches behind it.
    """
    scene = Scene()
    scene.outage()
    for i in range(25):
        lease = scene.lease(f"m{i}")
        lease.recall = Recall(scene.gate.core.hidden)
        lease.defer(261.0)
    scene.make_calls()
    scene.recover()
    scene.port.batches.clear()
    scene.gate.core.rate.rate = 100.0

    def hangs(entries: list[tuple[str, int]]) -> list[Failure | None]:
        scene.port.batches.append(entries)
        scene.now += 30.0
        return [None] * len(entries)

    scene.port.change_visibility = hangs  # type: ignore[method-assign]
    scene.now += 1.0
    assert len(scene.recall()) == 20, "the third batch would leave when their hold ends"
    assert len(scene.port.batches) == 2


@pytest.mark.parametrize(
    ("kind", "sent_again"),
    [(Kind.THROTTLED, True), (Kind.UNREACHABLE, True), (Kind.IN_DOUBT, False)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_recall_despite_sqs_failure(kind: Kind, sent_again: bool) -> None:
    """The worker repeats a recall that SQS has refused.

    If the response is lost, the worker does not repeat the recall, because another worker may have
    the message. Messages of such calls stay hidden until they are due. They are few: the first
    batches, and then one message now and then.
    """
    scene = Scene()
    scene.outage()
    scene.hide_many(200)
    scene.recover()
    scene.port.batches.clear()
    scene.gate.core.rate.rate = 50.0
    scene.port.failure = Failure(kind, "Whatever", is_of_call=True)
    failed = []
    for _ in range(40):
        scene.now += 0.25
        failed += scene.recall()
    assert len(scene.port.batches) <= 40, "too many calls in ten seconds"
    assert sent_again or len(set(failed)) <= 50
    scene.port.failure = None
    scene.port.batches.clear()
    recalled = []
    for _ in range(800):
        scene.now += 0.25
        recalled += scene.recall()
    everything = {f"handle of m{i}" for i in range(200)}
    assert sorted(recalled) == sorted(everything if sent_again else everything - set(failed))
    assert scene.keeper.waiting == 0


def test_recall_of_unknown_message() -> None:
    """The worker does not recall a message again when SQS does not know it."""
    scene = Scene()
    scene.outage()
    scene.hide("m")
    scene.recover()
    scene.port.failure = Failure(Kind.STALE_HANDLE, "ReceiptHandleIsInvalid")
    recalled = []
    for _ in range(40):
        scene.now += 0.25
        recalled += scene.recall()
    assert recalled == ["handle of m"]
    assert not any(isinstance(event, SettlementFailed) for event in scene.seen)


def test_hold_in_doubt() -> None:
    """The worker does not recall a message if it does not know when SQS hid the message.

    The message may have been visible before, and another worker may have received it.
    """
    scene = Scene()
    scene.outage()
    scene.port.failure = Failure(Kind.IN_DOUBT, "timeout", is_of_call=True)
    scene.hide("m")
    scene.port.failure = None
    scene.now += 5.0
    assert len(scene.make_calls()) == 1
    assert scene.gate.hidden == 0


def test_newer_receive_ends_recall() -> None:
    """If the worker receives a message again during its recall, it renews the new lease at once.

    The recall could have made the message visible after the receive.
    """
    scene = Scene()
    scene.outage()
    scene.hide("m")
    scene.recover()
    scene.now += 1.0
    scene.gates.recall()
    call = scene.keeper.next_call()
    assert call is not None
    newer = scene.lease("m", receive_count=2)
    scene.keeper.enter(call, [None])
    assert scene.make_calls() == [("handle of m", 30)], "the worker has not renewed the lease"
    assert newer.state is LeaseState.HELD


def test_hold_for_other_reason() -> None:
    """The gate does not count messages that are hidden for another reason, such as an ETA."""
    scene = Scene()
    scene.outage()
    scene.lease("a task's ETA").defer(9999.0)
    scene.make_calls()
    assert scene.gate.hidden == 0


def test_hidden_message_is_small() -> None:
    """While a message is hidden, the worker does not keep its body and its request in memory."""
    scene = Scene()
    scene.outage()
    lease = scene.lease("m")
    lease.on_lost = lambda: None
    assert scene.gate.keeps_back(lease, scene.options, list)
    scene.make_calls()
    assert (lease.body, lease.on_lost) == ("", None)


def test_hand_over_at_stop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A worker that stops lets the messages that it has hidden come back soon.

    A message stays hidden if its next receive is the last that its queue allows.
    """
    caplog.set_level("INFO")
    scene = Scene()
    scene.outage()
    for i in range(30):
        scene.hide(f"m{i}")
    scene.hide("its next receive is its last", receive_count=4, max_receive_count=5)
    scene.port.batches.clear()
    scene.gates.hand_over()
    entries = [entry for batch in scene.port.batches for entry in batch]
    assert sorted(handle for handle, _ in entries) == sorted(f"handle of m{i}" for i in range(30))
    assert max(seconds for _, seconds in entries) <= 4
    assert "provider_handed_over: 30 of 30" in caplog.text
    scene.gates.hand_over()
    assert len(scene.port.batches) == 3


def test_providers_share_room() -> None:
    """Recovering providers share the number of messages that the worker may recall.

    A recovery does not hold up the probe of another provider.
    """
    scene = Scene(room=4)
    for name in ("mail", "sms", "fax"):
        gate = scene.gates.of(Provider(name))
        assert gate is not None
        scene.gate = gate
        scene.outage()
        for i in range(9):
            scene.hide(f"{name} {i}")
        if name != "fax":
            scene.now += 200.0
            scene.run(f"the probe of {name}", RunEnd(End.RETURNED))
            scene.gate.core.rate.rate = 100.0
    scene.now += 200.0
    handles = scene.recall()
    assert len([each for each in handles if "fax" in each]) == 1
    assert len([each for each in handles if "fax" not in each]) == 4


def test_recovery_is_reported() -> None:
    """Status and events report a recovery until it is over."""
    scene = Scene()
    scene.outage()
    for i in range(2):
        scene.hide(f"m{i}")
    assert scene.gates.now() == [ProviderNow(provider="mail", state="paused", hidden=2)]
    scene.recover()
    assert scene.gates.now() == [
        ProviderNow(provider="mail", state="recovering", hidden=2, rate=1.0)
    ]
    for _ in range(100):
        scene.now += 1.0
        scene.recall()
    told = [event for event in scene.seen if isinstance(event, ProviderRecovering)]
    assert [event.waiting for event in told] == [2, 0]
    assert scene.gates.now() == [ProviderNow(provider="mail", state="ok")]


def test_hand_over_with_hanging_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that stops does not wait for a call that hangs."""
    monkeypatch.setattr(providers, "HAND_OVER_SECONDS", 0.05)
    scene, may_go_on = Scene(), threading.Event()
    scene.outage()
    scene.hide_many(300)

    def hang(entries: list[tuple[str, int]]) -> list[Failure | None]:
        scene.port.batches.append(entries)
        may_go_on.wait(60)
        return [None] * len(entries)

    scene.port.change_visibility = hang  # type: ignore[method-assign]
    began = time.monotonic()
    scene.gates.hand_over()
    assert time.monotonic() - began < 30.0
    assert len(scene.port.batches) == 1
    may_go_on.set()


def test_hand_over_without_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a worker that stops cannot start a thread, its hidden messages stay hidden."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    scene = Scene()
    scene.outage()
    scene.hide_many(1)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    scene.gates.hand_over()
    assert scene.port.batches == []


def test_hides_all() -> None:
    """While the provider is down and no probe is due, a gate hides every message.

    So a task does not have to wait for its ``rate_limit`` before its message is hidden.
    """
    scene = Scene()
    assert not scene.gate.hides_all
    scene.outage()
    assert scene.gate.hides_all
    scene.now += 60.0
    assert not scene.gate.hides_all, "a probe is due now"


def test_delay_after_failure() -> None:
    """A failed message waits for as long as the gate says, and at least for its Retry-After."""
    scene = Scene(backoff=FullJitter(cap=100))
    lease = scene.lease("m")
    ended = RunEnd(End.RAISED, Hide(3.0, retry_after=50.0), Reply.FAILED)
    assert scene.gate.delayed(3.0, lease, ended, scene.options) == 3.0
    scene.outage()
    assert scene.gate.delayed(3.0, lease, ended, scene.options) >= 75
    assert lease.recall is not None
    assert lease.recall.not_before == scene.now + 50.0


def test_named_delay() -> None:
    """The gate does not cut a delay that the task has named.

    The task calls ``self.retry(countdown=600)``, perhaps from the provider's Retry-After.
    """
    scene = Scene(backoff=FullJitter(cap=100))
    scene.outage()
    scene.recover()
    lease = scene.lease("m")
    ended = RunEnd(End.RETRY_ASKED, Hide(600.0, is_named=True))
    scene.gate.ended(lease, ended)
    assert scene.gate.delayed(600.0, lease, ended, scene.options) == 600.0
    assert lease.recall is not None
    assert lease.recall.not_before == scene.now + 600.0


def paced(scene: Scene, name: str, **facts: Any) -> tuple[Any, list[str]]:
    """Let a message wait in line for a slot. Return it, and a list that gets its name at its start.

    A provider with a rate gives each call a slot, which is a time to start.
    """
    lease = scene.lease(name, **facts)
    started: list[str] = []
    assert scene.gate.keeps_back(lease, scene.options, lambda: started.append(name))
    return lease, started


def step(scene: Scene) -> None:
    for action in scene.gates.pacer.step(scene.now):
        action()


@pytest.mark.parametrize("how", ["begins", "is settled", "is hidden"])
def test_slot_is_passed_on(how: str) -> None:
    """When a message has used or given up its slot, the next message in line gets one.

    Otherwise no message of the provider would start in this worker any more.
    """
    scene = Scene(provider=Provider("mail", rate=1.0))
    first, second = paced(scene, "a"), paced(scene, "b")
    for _ in range(3):
        step(scene)
        scene.now += 2.0
    assert (first[1], second[1]) == (["a"], []), "only one message may start"
    if how == "begins":
        first[0].has_turn = False
    elif how == "is settled":
        first[0].give_back(until=1.0)
    else:
        scene.outage()
        assert scene.gate.keeps_back(first[0], scene.options, list)
    step(scene)
    scene.now += 1.1
    step(scene)
    assert second[1] == ["b"]


@pytest.mark.parametrize(("seconds", "keeps"), [(0.5, False), (2.0, True)])
def test_place_in_the_window(seconds: float, *, keeps: bool) -> None:
    """A message in line keeps its place in the window while other messages lack a process."""
    scene = Scene(provider=Provider("mail", rate=1.0))
    paced(scene, "a")
    step(scene)
    step(scene)
    scene.now += seconds
    assert paced(scene, "b")[0].keeps_place is keeps


def test_waiting_is_counted() -> None:
    """Status counts the messages that wait in line for a provider, and those hidden for it."""
    scene = Scene(provider=Provider("mail", rate="60/m"))
    for number in range(3):
        paced(scene, f"m{number}")
    assert scene.gates.now() == [ProviderNow(provider="mail", state="ok", in_line=3)]
    scene = Scene()
    scene.outage()
    scene.hide("m")
    assert scene.gates.now() == [ProviderNow(provider="mail", state="paused", hidden=1)]


def test_last_receive_waits_in_line() -> None:
    """At its last receive, a message waits for its slot in the worker and is not hidden."""
    scene = Scene(provider=Provider("mail", rate="1/m"))
    first, _ = paced(scene, "m0")
    last, started = paced(scene, "m1", receive_count=5, max_receive_count=5)
    step(scene)
    first.has_turn = False  # its task has begun
    assert not last.is_settled()
    scene.now += 63.2
    step(scene)
    assert started == ["m1"]


def test_slot_after_budget() -> None:
    """If a message's slot is after the end of its ``retry_for``, it is hidden until shortly before.

    At its next receive, the message waits in line for its slot.
    """
    scene = Scene(provider=Provider("mail", rate="1/m"), retry_for=300.0)
    now = time.time()
    facts = {"first_received_at": now, "sent_at": now, "receive_count": 2, "received_at": now}
    leases = [paced(scene, f"m{i}", **facts)[0] for i in range(8)]
    step(scene)
    assert leases[-1].is_settled()
    assert 200.0 <= leases[-1].due_at - scene.now < 300.0
    scene.now += 299.0
    again, _ = paced(scene, "m7", **{**facts, "first_received_at": now - 299.0, "receive_count": 3})
    step(scene)
    assert not again.is_settled()


def test_rate_after_budget() -> None:
    """The worker also keeps to the rate for messages after the end of their ``retry_for``.

    If all workers were stopped for a long time, such messages still run once.
    """
    scene = Scene(provider=Provider("mail", rate="1/s"), retry_for=600.0)
    facts = {"first_received_at": time.time() - 3600.0, "receive_count": 2}
    started = [paced(scene, f"m{i}", **facts)[1] for i in range(30)]
    step(scene)
    assert sum(map(bool, started)) == 1


@pytest.mark.parametrize(("rate", "starts"), [("100/s", 2), ("30/m", 1)], ids=str)
def test_slower_of_two_rates(rate: str, starts: int) -> None:
    """A message starts at the slower of the agreed rate and the rate of the recovery.

    A provider that recovers takes one call a second at first. The agreed rate may be lower.
    """
    scene = Scene(provider=Provider("mail", rate=rate))
    scene.outage()
    scene.recover()
    line = [paced(scene, f"m{i}") for i in range(2)]
    for _ in range(30):
        step(scene)
        scene.now += 0.05
    for lease, started in line:
        if started:
            lease.has_turn = False  # its task has begun
    assert sum(len(started) for _, started in line) == starts


def test_settled_while_in_line() -> None:
    """A message that is settled while it waits in line does not start."""
    scene = Scene(provider=Provider("mail", rate=1.0))
    lease, started = paced(scene, "a")
    lease.give_back(until=1.0)
    step(scene)
    assert started == []


def test_outage_after_slot() -> None:
    """A message with a slot is hidden if the provider has gone down in the meantime."""
    scene = Scene(provider=Provider("mail", rate=1000.0))
    lease, _ = paced(scene, "late")
    step(scene)
    assert lease.has_turn
    scene.outage()
    assert scene.gate.keeps_back(lease, scene.options, list)


def test_probe_needs_no_slot() -> None:
    """A probe runs without waiting for a slot."""
    scene = Scene(provider=Provider("mail", rate="1/h"))
    for i in range(6):
        lease = scene.lease(f"m{i}")
        scene.gate.ended(lease, RunEnd(End.RAISED, Hide(3.0), Reply.FAILED))
    scene.now += 100.0
    probe = scene.lease("probe")
    assert not scene.gate.keeps_back(probe, scene.options, list)


@pytest.mark.parametrize("rate", [None, "1/h"])
def test_probe_waits_in_celery(rate: str | None) -> None:
    """The gate lets a probe run that has waited in Celery, for example for its ``rate_limit``.

    When the gate sees the message again, it still knows that this message is the probe.
    """
    scene = Scene(provider=Provider("mail", rate=rate))
    for i in range(6):
        scene.gate.ended(scene.lease(f"m{i}"), RunEnd(End.RAISED, Hide(3.0), Reply.FAILED))
    scene.now += 10.0
    probe = scene.lease("probe", receive_count=2)
    assert not scene.gate.keeps_back(probe, scene.options, list)
    probe.has_turn = False  # Celery does not start the task yet
    scene.now += 5.0
    assert not scene.gate.keeps_back(probe, scene.options, list)


def test_events() -> None:
    """Observers get an event for a provider's pause, probe, recovery and recalls."""
    scene = Scene()
    scene.outage()
    scene.hide("m")
    scene.recover()
    for _ in range(5):
        scene.now += 1.0
        scene.recall()
    scene.now += CALM_SECONDS + 1
    scene.recall()
    told = (OfProvider, Recalled)
    assert [event for event in scene.seen if isinstance(event, told)] == [
        ProviderPaused(provider="mail"),
        ProviderProbed(provider="mail"),
        ProviderRecovering(provider="mail", rate=1.0, waiting=1),
        Recalled(queue="mail", message_ids=("m",)),
        ProviderRecovered(provider="mail", recalled=1),
    ]


def test_observers_without_lock() -> None:
    """The worker calls observers without the lock that renewals need.

    So a log that is slow or blocked does not hold up renewals.
    """
    scene, was_free = Scene(), []

    def hear(event: WorkerEvent) -> None:
        def take() -> None:
            was_free.append(scene.keeper.lock.acquire(timeout=0.5))
            if was_free[-1]:
                scene.keeper.lock.release()

        other = threading.Thread(target=take)
        other.start()
        other.join()

    scene.keeper.events.subscribe(hear)
    scene.outage()
    scene.hide("m")
    scene.recover()
    scene.now += 1.0
    scene.recall()
    assert len(was_free) >= 5
    assert all(was_free)


class Task:
    """The part of a task that gates use."""

    def __init__(self, **options: Any) -> None:
        self.backoff_options = Options(**options)

    def run(self, account: str, text: str = "") -> None: ...


def test_tenants_have_own_gates() -> None:
    """Each tenant of a provider has its own gate."""
    scene = Scene()
    task = Task(provider=Provider("mail", key="account"))
    gates = [
        scene.gates.of_call(task, lambda a=account: ((a,), {}, {}))  # type: ignore[misc]
        for account in "aab"
    ]
    assert gates[0] is gates[1]
    assert gates[0] is not gates[2]


def test_tenant_in_events() -> None:
    """An event does not show the value that names a tenant."""
    scene = Scene()
    task = Task(provider=Provider("mail", key="account"))
    gate = scene.gates.of_call(task, lambda: ((), {"account": "secret-account"}, {}))
    assert gate is not None
    for i in range(6):
        lease = scene.lease(f"m{i}")
        gate.ended(lease, RunEnd(End.RAISED, Hide(3.0), Reply.FAILED))
    (opened,) = scene.seen
    assert isinstance(opened, ProviderPaused)
    assert opened.tenant
    assert "secret" not in repr(opened)


def test_tenants_are_bounded() -> None:
    """The worker limits the number of tenants' gates, and keeps the gates with failures."""
    scene = Scene()
    provider = Provider("mail", key="account")
    failing = scene.gates.of(provider, "failing")
    assert failing is not None
    for i in range(6):
        lease = scene.lease(f"m{i}")
        failing.ended(lease, RunEnd(End.RAISED, Hide(3.0), Reply.FAILED))
    for i in range(MOST_TENANTS + 50):
        scene.gates.of(provider, f"tenant {i}")
    assert len(scene.gates._gates) <= MOST_TENANTS + 1  # one more for calls without a tenant
    assert scene.gates.of(provider, "failing") is failing


def test_tenants_run_elsewhere() -> None:
    """The worker can drop a tenant's gate when the tenant's hidden messages are due.

    Otherwise the gates of 1,000 tenants with one failure each would stay for ever, and all new
    tenants would share one gate.
    """
    provider, failed = (
        Provider("mail", key="account"),
        RunEnd(End.RAISED, Hide(3.0), Reply.FAILED),
    )
    scene = Scene(provider=provider)
    for i in range(MOST_TENANTS):
        gate, lease = scene.gates.of(provider, f"tenant {i}"), scene.lease(f"m{i}")
        assert gate is not None
        gate.ended(lease, failed)
        gate.delayed(60.0, lease, failed, scene.options)
        lease.defer(60.0)
    scene.make_calls()
    assert sum(one.hidden for one in scene.gates.now()) == MOST_TENANTS
    scene.now += 60.0
    scene.make_calls()
    assert not any(one.hidden for one in scene.gates.now()), "they have come back"
    assert scene.gates.of(provider, "new") is not scene.gates.of(provider, "another")


def test_tasks_share_gate() -> None:
    """Tasks of the same provider share a gate. A task without a provider has no gate."""
    gates = Scene().gates
    assert gates.of("sms") is gates.of("sms") is gates.of(Provider("sms"))
    assert gates.of("other") is not gates.of("sms")
    assert gates.of(None) is None


@pytest.mark.parametrize("value", ["", 5, [], object()])
def test_invalid_provider(value: object) -> None:
    """Options refuse a provider that is not a name or a ``Provider``."""
    with pytest.raises(InvalidOption, match="provider"):
        Options(provider=value)


def test_probe_ends_before_run() -> None:
    """If a probe's message is settled before its run, the gate takes another message as a probe.

    For example, the worker gives the message back when it loses its connection.
    """
    scene = Scene()
    scene.outage()
    scene.now += 200.0
    probe = scene.lease("probe")
    assert not scene.gate.keeps_back(probe, scene.options, list)
    probe.give_back()
    scene.gates.recall()
    scene.now += 200.0
    assert not scene.gate.keeps_back(scene.lease("next"), scene.options, list), (
        "the next message is no probe"
    )


@pytest.mark.parametrize("when", ["is asked", "waits for a process"])
def test_probe_lost_before_run(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """If a probe's lease is lost before its run, the gate takes another message as a probe.

    Otherwise the gate would wait ten minutes for the lost probe.
    """
    scene = Scene()
    scene.outage()
    scene.now += 10.0
    probe, arrived = scene.lease("probe"), scene.gate.core.arrived

    def lose(*args: Any, **facts: Any) -> Any:
        look = arrived(*args, **facts)
        probe.lose()
        return look

    if when == "is asked":
        monkeypatch.setattr(scene.gate.core, "arrived", lose)
        assert scene.gate.keeps_back(probe, scene.options, list)
    else:
        assert not scene.gate.keeps_back(probe, scene.options, list)
        probe.lose()
    assert scene.gate.core.probe == "probe"
    scene.gates.recall()
    assert scene.gate.core.probe is None


def test_lost_while_gate_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A task does not begin if its lease is lost while the gate decides."""
    scene = Scene()
    lease = scene.lease("m")
    assert not scene.gate.keeps_back(lease, scene.options, list)
    scene.outage()
    arrived = scene.gate.core.arrived

    def lose(*args: Any, **facts: Any) -> Any:
        lease.lose()
        return arrived(*args, **facts)

    monkeypatch.setattr(scene.gate.core, "arrived", lose)
    assert scene.gate.keeps_back(lease, scene.options)


def test_probe_lost_during_run() -> None:
    """The gate waits for the end of a probe that goes on after its lease was lost."""
    scene = Scene()
    scene.outage()
    scene.now += 200.0
    probe = scene.lease("probe")
    assert not scene.gate.keeps_back(probe, scene.options, list)
    probe.handed_to_pool = lambda: True
    probe.lose()
    scene.gates.recall()
    assert scene.gate.core.state is GateState.OPEN
    assert scene.gate.core.probe == "probe"
    scene.gate.ended(probe, RunEnd(End.RETURNED))
    assert scene.gate.core.state is GateState.RECOVERING


def test_different_descriptions(caplog: pytest.LogCaptureFixture) -> None:
    """At its start, the worker warns if tasks describe one provider with different settings."""
    same, named = Provider("same", failures=8), Provider("mail", failures=8)

    def task(provider: Provider | str | None) -> Any:
        return SimpleNamespace(backoff_options=Options(provider=provider))

    tasks = [task(each) for each in (same, Provider("same", failures=8), None, named, "mail")]
    introduce(Celery(broker="memory://"), tasks)
    differing = [text for text in caplog.messages if "provider_differs" in text]
    assert len(differing) == 1
    assert "mail" in differing[0]
