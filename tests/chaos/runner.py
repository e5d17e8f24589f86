"""Send tasks, disturb the workers, let them finish in peace, and count what happened."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from tests.acceptance.stage import Stage, stage
from tests.support.fault_proxy import (
    Fault,
    delayed,
    drop_after,
    drop_before,
    failed_entries,
    throttled,
    unavailable,
)
from tests.support.servers import sqs_client, sqs_server

from .explain import Call, History, Run, explain, explains_copies, extra_runs
from .fleet import Fleet, fleet
from .monkey import Monkey
from .plan import Plan, draw_plan
from .report import Extra, Report
from .tasks import TASK_NAME
from .witness import ACTIONS, witness

VISIBILITY_TIMEOUT_SECONDS = 6

#: The proxy delays a response for this time. A worker does not wait so long for the response to a
#: delete or a delay, so it does not learn whether SQS has carried out the call.
TIMEOUT_SECONDS = 12.0


def run_chaos(
    *,
    tasks: int,
    seed: int,
    directory: Path,
    chaos_seconds: float,
    pause_seconds: float = 1.5,
    drain_seconds: float = 60.0,
) -> Report:
    """Send ``tasks`` over ``chaos_seconds`` of faults and kills, and then let the workers finish.

    Arguments:
        seed: decides what tasks do, which calls fail, and which processes the monkey kills. The
            exact times still differ from run to run.
        directory: an empty directory for the workers' logs, the calls to SQS and the tasks' notes.
        pause_seconds: the longest pause between two deeds of the monkey.
        drain_seconds: within this time after the chaos, each message must be done or a dead letter.
    """
    rng = Random(seed)
    plans = draw_plan(tasks, rng)
    queue = {"visibility_timeout_seconds": VISIBILITY_TIMEOUT_SECONDS, "max_receive_count": 1000}
    with (
        sqs_server() as endpoint,
        witness(endpoint, directory / "calls") as proxy,
        stage(
            module="tests.chaos.tasks",
            sqs=sqs_client(endpoint),
            endpoint=endpoint,
            directory=directory,
            proxy=proxy,
            queues={"chaos": queue},
        ) as made,
    ):
        proxy.record()
        with fleet(made) as crew:
            proxy.inject(*_faults(rng))
            with Monkey(crew, proxy, Random(rng.random()), pause_seconds) as monkey:
                _send(made, plans, chaos_seconds)
            proxy.heal()
            drained = _drained(made, drain_seconds)
        return _report(made, plans, crew, monkey, directory / "calls", seed, drained)


def _faults(rng: Random) -> Iterable[Fault]:
    for make, probability in (
        (unavailable, 0.03),
        (throttled, 0.03),
        (drop_before, 0.02),
        (drop_after, 0.03),
        (failed_entries, 0.03),
    ):
        yield make(probability=probability, actions=ACTIONS, seed=rng.getrandbits(32))
    for seconds, probability in ((1.0, 0.03), (TIMEOUT_SECONDS, 0.005)):
        yield delayed(seconds, probability=probability, actions=ACTIONS, seed=rng.getrandbits(32))


def _send(made: Stage, plans: Sequence[Plan], over_seconds: float) -> None:
    begin = time.monotonic()
    for n, plan in enumerate(plans):
        made.send(TASK_NAME, plan.behaviour, plan.times, plan.seconds, task_id=plan.task_id)
        ahead = begin + over_seconds * (n + 1) / len(plans) - time.monotonic()
        if ahead > 0:
            time.sleep(ahead)


def _drained(made: Stage, seconds: float) -> bool:
    try:
        made.wait_until_settled(timeout=seconds)
    except AssertionError:
        return False
    return True


def _report(
    made: Stage,
    plans: Sequence[Plan],
    crew: Fleet,
    monkey: Monkey,
    log: Path,
    seed: int,
    drained: bool,
) -> Report:
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    runs, of_task = _runs(made.record.entries(), calls)
    letters: dict[str, list[str | None]] = defaultdict(list)
    for letter in made.dead_letters():
        if letter.record is not None:
            letters[letter.record["id"]].append(letter.record["reason"])
    witnessed = _Witnessed(calls, crew)
    extras = []
    for task_id, of_this in runs.items():
        settled, more = extra_runs(of_this)
        for extra in more:
            assert settled is not None
            history = witnessed.history(task_id, extra.message_id, monkey)
            why = explain(extra, settled, history)
            extras.append(Extra(task_id, why, () if why else _timeline(history, of_this)))
    rerun = {extra.task_id for extra in extras}  # the second run may send a second dead letter
    copied = [task_id for task_id, reasons in letters.items() if len(reasons) > 1]
    of_nothing = [
        task_id
        for task_id in copied
        if task_id not in rerun
        and not explains_copies(witnessed.history(task_id, runs[task_id][0].message_id, monkey))
    ]
    return Report(
        seed=seed,
        sent=[plan.task_id for plan in plans],
        done={entry["task_id"] for entry in of_task if entry["what"] == "success"},
        letters=dict(letters),
        runs=sum(len(of_this) for of_this in runs.values()),
        extras=extras,
        copies_of_nothing=of_nothing,
        faults=witnessed.faults(),
        deeds=dict(monkey.deeds),
        workers=sum(len(berth.manned) for berth in crew.berths),
        deserted=crew.deserted,
        left=() if drained else made.messages(),
    )


def _runs(
    entries: Iterable[dict[str, Any]], calls: Iterable[dict[str, Any]]
) -> tuple[dict[str, list[Run]], list[dict[str, Any]]]:
    """Return the runs of each task, and the entries that runs made at their ends, with task IDs."""
    receives = {handle: call for call in calls for handle in call["received"]}
    begun: dict[str, dict[str, Any]] = {}
    ended: dict[str, dict[str, Any]] = {}
    for entry in entries:
        (begun if entry["what"] == "start" else ended)[entry["run"]] = entry
    runs: dict[str, list[Run]] = defaultdict(list)
    for run, start in begun.items():
        end, receive = ended.get(run, {}), receives[start["handle"]]
        runs[start["task_id"]].append(
            Run(
                message_id=start["message_id"],
                worker=start["worker"],
                pid=start["pid"],
                received_at=receive["reached_at"],
                arrived_at=receive["answered_at"],
                started_at=start["at"],
                ended_at=end.get("at"),
                outcome=end.get("what"),
            )
        )
    with_ids = [end | {"task_id": begun[run]["task_id"]} for run, end in ended.items()]
    return dict(runs), with_ids


class _Witnessed:
    """The calls that the proxy has noted, by message."""

    def __init__(self, calls: Sequence[dict[str, Any]], crew: Fleet) -> None:
        self._calls = calls
        self._pids = {call["worker"]: crew.pid_of(call["worker"] or "") for call in calls}
        self._by_subject: dict[str, list[Call]] = defaultdict(list)
        self._received_at: dict[str, list[float]] = defaultdict(list)
        for call in calls:
            for message_id in call["received"].values():
                self._received_at[message_id].append(call["reached_at"])
            for position, entry in enumerate(call["entries"]):
                subject = entry["message_id"] or entry["task_id"]
                if subject is not None:
                    self._by_subject[subject].append(self._call(call, position, entry["seconds"]))
        self._slow = [self._call(call, None, None) for call in calls if call["fault"] == "delay"]

    def _call(self, call: dict[str, Any], position: int | None, seconds: int | None) -> Call:
        is_spoiled = position is None or position in call["spoiled"]
        return Call(
            action=call["action"],
            worker=self._pids[call["worker"]] or 0,
            at=call["at"],
            answered_at=call["answered_at"],
            reached=position in call["succeeded"],
            fault=call["fault"] if is_spoiled else None,
            seconds=seconds,
        )

    def history(self, task_id: str, message_id: str, monkey: Monkey) -> History:
        return History(
            visibility_timeout_seconds=VISIBILITY_TIMEOUT_SECONDS,
            received_at=self._received_at[message_id],
            calls=sorted(
                [*self._by_subject[message_id], *self._by_subject[task_id]], key=lambda c: c.at
            ),
            slow_calls=self._slow,
            kills=monkey.kills,
            outages=monkey.outages,
        )

    def faults(self) -> dict[str, int]:
        found: dict[str, int] = defaultdict(int)
        for call in self._calls:
            if call["fault"]:
                found[call["fault"]] += 1
        return dict(found)


def _timeline(history: History, runs: Iterable[Run]) -> tuple[str, ...]:
    """Return what happened to a message, one event per line, to help find the bug."""
    events: list[tuple[float, str]] = [(at, "received") for at in history.received_at]
    for call in history.calls:
        facts = f"{call.action} by {call.worker}, {call.seconds} s, fault {call.fault}"
        events.append((call.at, f"{facts}, reached {call.reached}"))
    for run in runs:
        events.append((run.started_at, f"starts in {run.pid} of {run.worker}"))
        if run.ended_at is not None:
            events.append((run.ended_at, f"ends in {run.pid} of {run.worker}: {run.outcome}"))
    processes = {pid for run in runs for pid in (run.pid, run.worker)}
    events += [(k.at, f"{k.signal} to {k.pid}") for k in history.kills if k.pid in processes]
    return tuple(f"{at:.3f}  {what}" for at, what in sorted(events))
