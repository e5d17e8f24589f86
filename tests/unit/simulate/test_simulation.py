"""The simulator: deterministic, loses nothing, and shows what the gate is for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from celery_sqs_backoff import FullJitter, Provider, Schedule
from celery_sqs_backoff.retry.decision import Reply
from celery_sqs_backoff.retry.options import Options
from celery_sqs_backoff.simulate.engine import STRATEGIES, SimulatedProvider, simulate
from celery_sqs_backoff.simulate.results import Result, plot
from celery_sqs_backoff.simulate.scenario import Scenario
from celery_sqs_backoff.simulate.worker import Decision, SimulatedMessage, SimulatedWorker


def outage(seconds: float, *, rate: float = 1.0, **options: Any) -> Scenario:
    return Scenario(outage=seconds, rate=rate, options=Options(**options))


def played(scenario: Scenario, strategy: str = "provider", seed: int = 1) -> Result:
    return simulate(scenario, strategy, seed=seed)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_message_ends(strategy: str) -> None:
    """Every message of a simulation is sent or becomes a dead letter."""
    result = played(outage(900.0, retry_for=600.0), strategy)
    assert result.count_calls(Reply.ANSWERED) + result.dead_letters == result.messages
    assert result.receives.total() == result.messages
    assert result.dead_letters


def test_same_seed() -> None:
    """The same seed gives the same figures."""
    scenario = outage(600.0)
    assert played(scenario, seed=3) == played(scenario, seed=3)
    assert played(scenario, seed=3) != played(scenario, seed=4)


def test_same_messages() -> None:
    """Every strategy gets the same messages."""
    scenario = outage(600.0)
    assert len({played(scenario, name).messages for name in STRATEGIES}) == 1


@pytest.mark.parametrize(("call_seconds", "processes"), [(0.2, 4), (1.0, 8)], ids=str)
def test_long_outage(call_seconds: float, processes: int) -> None:
    """A two-hour outage costs few calls, and its backlog drains near the limit.

    7,200 mails, the provider takes 20/s, cap 1 h, 10 workers. 13 to 30 seeds gave 1,510 to 1,560
    wasted calls. At 0.2 s 5 to 7 % were turned away, and it took 1.20 to 1.58 times the shortest
    time; at 1 s 11 to 18 %, and 1.10 to 1.35 times. One message had 12 to 16 receives. A rate that
    grows with each success took 12 times the shortest time at 1 s.
    """
    scenario = replace(outage(7200.0), call_seconds=call_seconds, processes=processes)
    for seed in (1, 2):
        result = played(scenario, seed=seed)
        assert result.count_calls(Reply.FAILED) <= 1700
        assert result.count_calls(Reply.REFUSED) <= 0.19 * result.messages
        assert result.drain_ratio is not None
        assert result.drain_ratio <= 1.7
        assert result.find_receives(0.99) <= 12
        assert result.find_receives(1) <= 17
        assert not result.dead_letters


def test_workers_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers get a share of the messages.

    Each gets at least half of an even share, also if one of them finds the outage first.
    """
    received: Counter[SimulatedWorker] = Counter()
    decide = SimulatedWorker.decide_on_receive

    def count(worker: SimulatedWorker, message: SimulatedMessage, now: float) -> Decision:
        received[worker] += now < 3600.0
        return decide(worker, message, now)

    monkeypatch.setattr(SimulatedWorker, "decide_on_receive", count)
    played(replace(outage(3600.0), rate=0.0, backlog=300))
    assert len(received) == 10
    assert min(received.values()) > received.total() / 10 / 2


def test_short_outage() -> None:
    """After a short outage, the backlog drains in little more than the shortest time.

    1,500 mails, 30 s, the provider takes 60/s, two workers of two. 53 seeds gave 1.10 to 1.33 times
    the shortest time (median 1.18), at most 34 calls while it was down, and 8 refused calls per 100
    messages.
    """
    scenario = Scenario(
        outage=30.0,
        rate=0.0,
        backlog=1500,
        capacity=60.0,
        call_seconds=0.03,
        workers=2,
        processes=2,
        prefetch=3,
        options=Options(
            backoff=FullJitter(base=4, cap=12), provider=Provider("mail", probe_interval=2)
        ),
    )
    results = [played(scenario, seed=seed) for seed in range(1, 14)]
    assert max(result.count_calls(Reply.FAILED) for result in results) <= 50
    assert max(result.count_calls(Reply.REFUSED) for result in results) <= 0.11 * 1500
    assert not any(result.dead_letters for result in results)
    ratios = [result.drain_ratio for result in results if result.drain_ratio is not None]
    assert len(ratios) == 13
    assert median(ratios) <= 1.3
    assert max(ratios) <= 1.5


def test_jitter_alone() -> None:
    """Jitter alone wastes 20 times as many calls, and drains late."""
    result = played(outage(3600.0), "full-jitter")
    assert result.count_calls(Reply.FAILED) > 20 * played(outage(3600.0)).count_calls(Reply.FAILED)
    assert result.drain_ratio is not None
    assert result.drain_ratio > 5


def test_schedule() -> None:
    """A worker does not recall a message whose policy is a schedule."""
    assert played(outage(900.0, backoff=Schedule([400]))).drain > 200
    assert played(outage(900.0)).drain < 200


@pytest.mark.parametrize("strategy", ["full-jitter", "provider"])
def test_last_run(strategy: str) -> None:
    """No message is given up without another run.

    A worker too lets a message run once more before its ``retry_for`` is over.
    """
    result = played(outage(3600.0, rate=0.3, retry_for=600.0), strategy)
    assert result.count_calls(Reply.FAILED) >= result.dead_letters > 0


def test_probes_with_few_messages() -> None:
    """Probes of many workers do not use up the receives of few messages.

    Ten workers probe ten times a minute, and two messages a minute arrive.
    """
    quiet = replace(outage(8 * 3600.0, rate=0.03), max_receive_count=50)
    result = played(quiet)
    assert not result.dead_letters
    assert result.find_receives(1) <= 1.1 * played(quiet, "full-jitter").find_receives(1)


def test_max_receive_count() -> None:
    """SQS moves messages to the dead-letter queue at ``maxReceiveCount``."""
    scenario = replace(outage(7200.0, rate=0.2), max_receive_count=5)
    result = played(scenario, "full-jitter")
    assert result.dead["the queue's maxReceiveCount is reached"] > 0


@pytest.mark.parametrize("seed", [1, 2])
def test_ten_receives(seed: int) -> None:
    """Ten receives outlast two hours, but for at most two messages in a thousand.

    A hold is half an hour at most, so that a killed worker's messages come back by then. It costs
    a receive each time.
    """
    result = played(replace(outage(7200.0), max_receive_count=10), seed=seed)
    assert result.dead_letters <= 0.002 * result.messages


@pytest.mark.parametrize("strategy", ["full-jitter", "provider"])
def test_last_receive(strategy: str) -> None:
    """On its last receive, a message runs even if the gate is open.

    A worker lets it run as well, because SQS would move it at the next receive.
    """
    result = played(replace(outage(7200.0, rate=0.2), max_receive_count=3), strategy)
    assert set(result.dead) == {"the queue's maxReceiveCount is reached"}
    assert result.find_receives(1) == 3


def test_healthy() -> None:
    """A healthy provider gets one call per message, and there is nothing to recover from."""
    result = played(Scenario(outage=0.0, backlog=3_000, capacity=1e9))
    assert result.count_calls(Reply.ANSWERED) == result.messages == 3_000
    assert result.find_receives(1) == 1
    assert (result.backlog, result.drain_ratio) == (3_000, pytest.approx(1.0, abs=0.1))


def test_curve() -> None:
    """A curve has a bounded number of points, and its area is the number of calls."""
    result = played(outage(3600.0), "full-jitter")
    curve = result.curve(Reply.FAILED)
    width = curve[1][0]
    assert len(curve) <= 720
    assert sum(rate * width for _, rate in curve) == pytest.approx(result.count_calls(Reply.FAILED))


def test_plot(tmp_path: Path) -> None:
    """A picture has a panel for each strategy, and the suffix of its file says the format."""
    results = [played(outage(300.0), name) for name in STRATEGIES]
    plot(results, "mails < all & more", tmp_path / "outage.svg")
    assert (tmp_path / "outage.svg").read_text().count('id="axes_') == 2
    plot(results, "png", tmp_path / "outage.png")
    assert (tmp_path / "outage.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="not supported"):
        plot(results, "text", tmp_path / "outage.text")


def test_capacity() -> None:
    """The simulated provider takes its capacity and turns the rest away."""
    provider = SimulatedProvider(Scenario(outage=0.0, capacity=10.0))
    sent = sum(provider.call(i / 100) is Reply.ANSWERED for i in range(1000))
    assert 100 <= sent <= 111


def test_without_recall() -> None:
    """A provider without recall keeps its gate, and messages keep the delays of their policy."""
    scenario = outage(1800.0, backoff=FullJitter(cap=60), provider=Provider("mail", recall=False))
    result = played(scenario)
    assert result.drain < 300
    assert (
        result.count_calls(Reply.FAILED)
        < played(scenario, "full-jitter").count_calls(Reply.FAILED) / 10
    )
