"""The worker's side of a provider: asked before a run, told at its end, recalling by SQS."""

from __future__ import annotations

import threading
import time
from random import Random
from typing import Any

import pytest

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
from celery_sqs_backoff.worker.providers import MOST_TENANTS, Gate, Gates

QUEUE = Queue("http://sqs/1/mail", visibility_timeout_seconds=30)


class Port:
    """Takes the calls about one queue, and counts those that show or hide a message."""

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
    """A worker's keeper and gates without threads: the test lets time pass."""

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
        """Receive a message."""
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
        assert self.gate.lets_begin(lease, self.options)
        self.gate.ended(lease, ended)
        lease.done()
        self.make_calls()

    def make_calls(self) -> list[tuple[str, int]]:
        """Make the calls that are due; return what was asked about visibility."""
        before = len(self.port.batches)
        while (call := self.keeper.next_call()) is not None:
            self.keeper.perform(call)
        return [entry for batch in self.port.batches[before:] for entry in batch]

    def recall(self) -> list[str]:
        """Let messages be brought forward; return the handles of those that SQS was asked for."""
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


def test_nothing_runs_while_the_provider_is_down_and_all_is_recalled_afterwards() -> None:
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


def test_what_is_brought_forward_waits_no_more_whoever_receives_it() -> None:
    """Else status, metrics and alerts count it until it would have been due: for an hour."""
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


def test_what_waits_behind_a_slow_call_is_recalled_only_while_its_hold_is_certain() -> None:
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
def test_an_sqs_that_fails_during_the_recall_costs_no_message_its_recall(
    kind: Kind, sent_again: bool
) -> None:
    """But for those in doubt, which another worker may have: one batch, and one now and then."""
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
    assert len(scene.port.batches) <= 40, "ten seconds"
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


def test_a_message_that_sqs_does_not_know_is_not_recalled_again() -> None:
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


def test_a_message_whose_hold_was_in_doubt_is_not_recalled() -> None:
    """It may have been seen before SQS hid it: then another worker has it."""
    scene = Scene()
    scene.outage()
    scene.port.failure = Failure(Kind.IN_DOUBT, "timeout", is_of_call=True)
    scene.hide("m")
    scene.port.failure = None
    scene.now += 5.0
    assert len(scene.make_calls()) == 1
    assert scene.gate.hidden == 0


def test_a_newer_receive_ends_a_recall() -> None:
    """SQS hands the message out while it is asked to show it: the newer hold must last."""
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
    assert scene.make_calls() == [("handle of m", 30)], "it is renewed at once"
    assert newer.state is LeaseState.HELD


def test_what_somebody_else_has_hidden_is_not_kept() -> None:
    scene = Scene()
    scene.outage()
    scene.lease("a task's ETA").defer(9999.0)
    scene.make_calls()
    assert scene.gate.hidden == 0


def test_a_hidden_message_holds_neither_its_body_nor_its_request() -> None:
    scene = Scene()
    scene.outage()
    lease = scene.lease("m")
    lease.on_lost = lambda: None
    assert scene.gate.keeps_back(lease, scene.options, list)
    scene.make_calls()
    assert (lease.body, lease.on_lost) == ("", None)


def test_a_worker_that_stops_lets_what_it_has_hidden_come_back_soon(
    caplog: pytest.LogCaptureFixture,
) -> None:
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


def test_providers_that_recover_share_the_room_of_the_worker() -> None:
    """And a recovery does not hold up the probe of another provider."""
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


def test_a_recovery_is_seen_until_it_is_over() -> None:
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


def test_a_call_that_hangs_does_not_hold_up_the_end_of_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_without_another_thread_nothing_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    scene = Scene()
    scene.outage()
    scene.hide_many(1)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    scene.gates.hand_over()
    assert scene.port.batches == []


def test_a_gate_hides_all_while_it_is_open_and_no_probe_is_due() -> None:
    """Then a task need not wait in Celery, for its ``rate_limit``, to be hidden."""
    scene = Scene()
    assert not scene.gate.hides_all
    scene.outage()
    assert scene.gate.hides_all
    scene.now += 60.0
    assert not scene.gate.hides_all, "what waits in Celery is no probe"


def test_a_failed_message_waits_as_long_as_the_gate_says_and_for_retry_after() -> None:
    scene = Scene(backoff=FullJitter(cap=100))
    lease = scene.lease("m")
    ended = RunEnd(End.RAISED, Hide(3.0, retry_after=50.0), Reply.FAILED)
    assert scene.gate.delayed(3.0, lease, ended, scene.options) == 3.0
    scene.outage()
    assert scene.gate.delayed(3.0, lease, ended, scene.options) >= 75
    assert lease.recall is not None
    assert lease.recall.not_before == scene.now + 50.0


def test_a_delay_that_the_task_has_named_is_not_cut_short() -> None:
    """``self.retry(countdown=600)``, perhaps from the provider's Retry-After."""
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
    """A message in line for a slot, and where it notes that it started."""
    lease = scene.lease(name, **facts)
    started: list[str] = []
    assert scene.gate.keeps_back(lease, scene.options, lambda: started.append(name))
    return lease, started


def step(scene: Scene) -> None:
    for action in scene.gates.pacer.step(scene.now):
        action()


@pytest.mark.parametrize("how", ["begins", "is settled", "is hidden"])
def test_a_message_that_gives_up_its_slot_makes_room_for_the_next(how: str) -> None:
    """Else no message of its provider would start in this worker any more."""
    scene = Scene(provider=Provider("mail", rate=1.0))
    first, second = paced(scene, "a"), paced(scene, "b")
    for _ in range(3):
        step(scene)
        scene.now += 2.0
    assert (first[1], second[1]) == (["a"], []), "one second's slots"
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


def test_what_waits_for_a_provider_is_counted() -> None:
    scene = Scene(provider=Provider("mail", rate="60/m"))
    for number in range(3):
        paced(scene, f"m{number}")
    assert scene.gates.now() == [ProviderNow(provider="mail", state="ok", in_line=3)]
    scene = Scene()
    scene.outage()
    scene.hide("m")
    assert scene.gates.now() == [ProviderNow(provider="mail", state="paused", hidden=1)]


def test_no_message_is_hidden_for_its_slot_on_its_last_receive() -> None:
    scene = Scene(provider=Provider("mail", rate="1/m"))
    first, _ = paced(scene, "m0")
    last, started = paced(scene, "m1", receive_count=5, max_receive_count=5)
    step(scene)
    first.has_turn = False  # its task has begun
    assert not last.is_settled()
    scene.now += 63.2
    step(scene)
    assert started == ["m1"]


def test_a_message_whose_slot_is_after_its_budget_waits_for_it_at_its_last_look() -> None:
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
        scene.now += 0.05
    for lease, started in line:
        if started:
            lease.has_turn = False  # its task has begun
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
    assert lease.has_turn
    scene.outage()
    assert scene.gate.keeps_back(lease, scene.options, list)


def test_a_probe_needs_no_slot() -> None:
    scene = Scene(provider=Provider("mail", rate="1/h"))
    for i in range(6):
        lease = scene.lease(f"m{i}")
        scene.gate.ended(lease, RunEnd(End.RAISED, Hide(3.0), Reply.FAILED))
    scene.now += 100.0
    probe = scene.lease("probe")
    assert not scene.gate.keeps_back(probe, scene.options, list)


@pytest.mark.parametrize("rate", [None, "1/h"])
def test_a_probe_that_waits_in_celery_runs_when_it_starts(rate: str | None) -> None:
    """It was hidden, as no probe was due: itself. On a quiet queue none ever ran."""
    scene = Scene(provider=Provider("mail", rate=rate))
    for i in range(6):
        scene.gate.ended(scene.lease(f"m{i}"), RunEnd(End.RAISED, Hide(3.0), Reply.FAILED))
    scene.now += 10.0
    probe = scene.lease("probe", receive_count=2)
    assert not scene.gate.keeps_back(probe, scene.options, list)
    probe.has_turn = False  # as it does not start yet
    scene.now += 5.0
    assert not scene.gate.keeps_back(probe, scene.options, list)


def test_what_happens_to_a_provider_is_on_the_stream() -> None:
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


def test_observers_are_told_without_the_lock_that_renewals_need() -> None:
    """A log that is slow, or blocked, holds up no lease."""
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
        lease = scene.lease(f"m{i}")
        gate.ended(lease, RunEnd(End.RAISED, Hide(3.0), Reply.FAILED))
    (opened,) = scene.seen
    assert isinstance(opened, ProviderPaused)
    assert opened.tenant
    assert "secret" not in repr(opened)


def test_tenants_are_bounded_and_those_that_fail_are_kept() -> None:
    scene = Scene()
    provider = Provider("mail", key="account")
    failing = scene.gates.of(provider, "failing")
    assert failing is not None
    for i in range(6):
        lease = scene.lease(f"m{i}")
        failing.ended(lease, RunEnd(End.RAISED, Hide(3.0), Reply.FAILED))
    for i in range(MOST_TENANTS + 50):
        scene.gates.of(provider, f"tenant {i}")
    assert len(scene.gates._gates) <= MOST_TENANTS + 1  # and that of no tenant
    assert scene.gates.of(provider, "failing") is failing


def test_messages_that_other_workers_have_run_keep_no_tenant() -> None:
    """Else, one failure each, 1,000 tenants stay for ever, and all new ones share one gate."""
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


def test_tasks_of_one_provider_share_its_gate() -> None:
    gates = Scene().gates
    assert gates.of("sms") is gates.of("sms") is gates.of(Provider("sms"))
    assert gates.of("other") is not gates.of("sms")
    assert gates.of(None) is None


@pytest.mark.parametrize("value", ["", 5, [], object()])
def test_a_provider_that_is_none_of_ours_is_refused(value: object) -> None:
    with pytest.raises(InvalidOption, match="provider"):
        Options(provider=value)


def test_a_probe_that_ends_before_its_run_is_replaced() -> None:
    """It is given back at a reconnect, or kept because its arguments cannot be used."""
    scene = Scene()
    scene.outage()
    scene.now += 200.0
    probe = scene.lease("probe")
    assert not scene.gate.keeps_back(probe, scene.options, list)
    probe.free()
    scene.now += 200.0
    assert not scene.gate.keeps_back(scene.lease("next"), scene.options, list), (
        "it is the probe now"
    )


@pytest.mark.parametrize("when", ["is asked", "waits for a thread"])
def test_a_probe_that_is_lost_before_its_run_is_replaced(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """It kept the gate closed for ten minutes."""
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
        probe.handed_to_pool = lambda: True
        probe.lose()
        scene.gate.not_begun(probe)
    assert scene.gate.core.probe is None


def test_a_message_that_is_lost_while_its_gate_decides_does_not_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene()
    lease = scene.lease("m")
    assert not scene.gate.keeps_back(lease, scene.options, list)
    scene.outage()
    arrived = scene.gate.core.arrived

    def lose(*args: Any, **facts: Any) -> Any:
        lease.lose()
        return arrived(*args, **facts)

    monkeypatch.setattr(scene.gate.core, "arrived", lose)
    assert not scene.gate.lets_begin(lease, scene.options)


def test_a_probe_that_runs_on_after_its_message_was_lost_is_waited_for() -> None:
    scene = Scene()
    scene.outage()
    scene.now += 200.0
    probe = scene.lease("probe")
    assert not scene.gate.keeps_back(probe, scene.options, list)
    probe.handed_to_pool = lambda: True
    probe.free()
    assert scene.gate.core.state is GateState.OPEN
    scene.gate.ended(probe, RunEnd(End.RETURNED))
    assert scene.gate.core.state is GateState.RECOVERING
