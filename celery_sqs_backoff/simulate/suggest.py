"""Which options survive an outage? Tries the package's policies, and shows the simulation."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from ..retry.policies import FullJitter
from ..sqs.limits import MAX_MAX_RECEIVE_COUNT
from ..units import parse_duration, parse_rate
from .engine import simulate
from .results import Result, result_of
from .scenario import Arrivals, Kind, Phase, Scenario, ScenarioError, Script
from .strategies import STRATEGIES

__all__ = ["DRAWS", "Goals", "Suggestion", "parse_goals", "suggest", "throughput"]

#: The longest first: it makes the fewest calls.
_CAPS_SECONDS = (14_400.0, 7200.0, 3600.0, 1800.0, 900.0, 300.0)
_CAPS_WITH_GATE = (3600.0, 900.0)
_DAY = 86_400.0
_LONGEST_RETENTION = 14 * _DAY

#: The options that one draw has found must hold in as many draws as these.
DRAWS = 3

#: A backlog beyond these is simulated with arrivals and capacity scaled alike. A single message,
#: or none, would tell nothing.
LEAST_MESSAGES, MOST_MESSAGES = 10, 1_500


@dataclass(frozen=True, kw_only=True)
class Goals:
    """Times are seconds; ``calls`` a second is what the provider takes."""

    survive: float
    drain: float
    calls: float


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """Options that reach the goals, and the simulation that shows it.

    Attributes:
        cap: of ``FullJitter(base=2, cap=...)``, seconds.
        retry_for: seconds.
        provider: whether the tasks need ``provider=``.
        max_receive_count: for the queue's redrive policy.
        retention: of the queue, seconds.
        result: the slowest to drain of the ``DRAWS`` simulations with these options.
    """

    cap: float
    retry_for: float
    provider: bool
    max_receive_count: int
    retention: float
    result: Result


def parse_goals(text: str) -> Goals:
    """Read ``"survive 24h, drain 1h, 20 calls/s"``.

    Raises:
        ScenarioError: a goal is missing, or not understood.
    """
    expected = "expected for example 'survive 24h, drain 1h, 20 calls/s'"
    found: dict[str, float] = {}
    for part in text.split(","):
        words = part.split()
        match = re.fullmatch(r"(\S+)\s*calls?/([smh])", part.strip())
        try:
            if match:
                found["calls"] = parse_rate(f"{match[1]}/{match[2]}") or 0.0
            elif len(words) == 2 and words[0] in ("survive", "drain"):
                found[words[0]] = parse_duration(words[1], words[0]) or 0.0
            else:
                raise ScenarioError(f"goal {part.strip()!r} is not understood: {expected}")
        except ValueError as exc:
            raise ScenarioError(str(exc)) from exc
    missing = {"survive", "drain", "calls"} - found.keys()
    if missing or min(found.values()) <= 0:
        raise ScenarioError(f"goals {text!r}: {expected}")
    if found["survive"] + found["drain"] > _LONGEST_RETENTION:
        raise ScenarioError(f"goals {text!r}: SQS keeps a message for 14 days at the most")
    return Goals(**found)


def throughput(scenario: Scenario, goals: Goals) -> float:
    """Return how many calls a second the fleet makes of those that the provider takes."""
    script = replace(scenario.script, capacity=goals.calls)
    return replace(scenario, script=script).throughput


def suggest(scenario: Scenario, goals: Goals, *, seed: int = 0) -> Suggestion | None:
    """Find the simplest options that reach the goals: without a provider's gate if that will do.

    Args:
        scenario: its fleet and its rate of new messages.
        goals: what to survive, and how fast to recover.
        seed: of the first draw; the others follow it.

    Returns:
        ``None``: none of the candidates reaches them; the provider may take too few calls, or the
        fleet make too few.
    """
    backlog, calls = scenario.arrivals.rate * goals.survive, throughput(scenario, goals)
    if backlog / calls > goals.drain:
        return None
    if not backlog:
        raise ScenarioError("messages.rate=0: expected new messages to suggest options for")
    scale = backlog / min(max(backlog, LEAST_MESSAGES), MOST_MESSAGES)
    tried = replace(
        scenario,
        script=Script(
            capacity=calls / scale,  # the fleet is not scaled
            call_seconds=scenario.script.call_seconds,
            failed_call_seconds=scenario.script.failed_call_seconds,
            phases=(Phase(kind=Kind.OUTAGE, start=0.0, lasts=goals.survive),),
        ),
        arrivals=Arrivals(rate=scenario.arrivals.rate / scale, lasts=goals.survive),
        horizon=None,
        max_receive_count=None,
    )
    for strategy, caps in (("full-jitter", _CAPS_SECONDS), ("gate+recall", _CAPS_WITH_GATE)):
        for cap in caps:
            if strategy == "full-jitter" and cap > goals.drain:
                continue  # the last message returns about a cap after the recovery
            retry_for = math.ceil((goals.survive + goals.drain + cap) / 3600) * 3600.0
            retention = min(_LONGEST_RETENTION, math.ceil(retry_for / _DAY + 1) * _DAY)
            candidate = replace(tried, retention=retention).with_task(
                backoff=FullJitter(base=2, cap=cap), retry_for=retry_for
            )
            result = _played(candidate, strategy, seed)
            if not _reaches(goals, result):
                continue
            # Probes spare a message that has used up half of them.
            receives = 2 * result.receives_max + 1
            if receives > MAX_MAX_RECEIVE_COUNT:
                continue
            candidate = replace(candidate, max_receive_count=receives)
            slowest = _slowest(candidate, strategy, goals, seed)
            if slowest is None:
                continue
            return Suggestion(
                cap=cap,
                retry_for=retry_for,
                provider=strategy != "full-jitter",
                max_receive_count=receives,
                retention=retention,
                result=slowest,
            )
    return None


def _slowest(scenario: Scenario, strategy: str, goals: Goals, seed: int) -> Result | None:
    """Return the slowest of several draws to drain; ``None``: one does not reach the goals."""
    results: list[Result] = []
    for draw in range(DRAWS):
        results.append(_played(scenario, strategy, seed + draw))
        if not _reaches(goals, results[-1]):
            return None
    return max(results, key=lambda each: each.drain or 0.0)


def _played(scenario: Scenario, strategy: str, seed: int) -> Result:
    return result_of(strategy, scenario, simulate(scenario, STRATEGIES[strategy], seed=seed))


def _reaches(goals: Goals, result: Result) -> bool:
    return result.drain is not None and result.drain <= goals.drain and not result.dead
