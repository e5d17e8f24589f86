"""Mistakes to be found by the simulation: ``python -m tests.simulation.mutations``.

Each is patched in, and histories are run until something is wrong, 400 at most. The command prints
what was found. It fails if a mistake that was found before is not found any more.

Of 20 mistakes 14 are found. ``NOT_FOUND`` names the other six. Four of them heal by themselves, as
each fact is kept twice for that: on the row, and in the worker's memory or on the message. The
fence and newer receipt handles are shown by ``tests/unit/test_keeper.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from celery_sqs_backoff.sqs import carry_out as carry_out_module
from celery_sqs_backoff.sqs import settlement
from celery_sqs_backoff.sqs.calls import Calls
from celery_sqs_backoff.sqs.errors import Failure, Kind
from celery_sqs_backoff.sqs.memory import Memory
from celery_sqs_backoff.sqs.settlement import Entry, Lane, Purpose, Row, SettlementTable, Want
from celery_sqs_backoff.worker.keeper import Keeper
from celery_sqs_backoff.worker.lease import Lease

from .search import first_failure

HISTORIES = 400


_LATER = (Kind.THROTTLED, Kind.UNREACHABLE, Kind.CREDENTIALS, Kind.CREDENTIALS_LATE)
_REFUSED = (Kind.DENIED, Kind.NO_QUEUE, Kind.UNSUPPORTED, Kind.LOCAL)


def _on(purpose: Purpose, kinds: tuple[Kind, ...], act: Callable[..., object] | None) -> Any:
    """Do this with what fails so; ``None``: take it for done."""
    enter = SettlementTable._enter

    def wrong(
        self: SettlementTable, entry: Entry, failure: Failure | None, asked_at: float, now: float
    ) -> None:
        if failure is None or entry.purpose is not purpose or failure.kind not in kinds:
            enter(self, entry, failure, asked_at, now)
        elif act is None:
            enter(self, entry, None, asked_at, now)
        else:
            act(self, entry, failure, now)

    return mock.patch.object(SettlementTable, "_enter", wrong)


def _drop(table: SettlementTable, entry: Entry, failure: Failure, now: float) -> None:
    table._finish(entry.row, settlement.Happening.TOO_LATE, entry.purpose, failure)


def _lose(table: SettlementTable, entry: Entry, failure: Failure, now: float) -> None:
    table._lose(entry.row, failure, now)


def _no_fence() -> Any:
    lane = SettlementTable._lane

    def wide(self: SettlementTable, url: str, operation: Any) -> Lane:
        made = lane(self, url, operation)
        made.capacity = 5
        return made

    return mock.patch.object(SettlementTable, "_lane", wide)


def _one_lane() -> Any:
    lane = SettlementTable._lane
    return mock.patch.object(
        SettlementTable, "_lane", lambda self, url, operation: lane(self, "x", operation)
    )


def _old_handles_count() -> Any:
    enter = SettlementTable._enter

    def trusting(self: SettlementTable, entry: Any, *rest: Any) -> None:
        handle, entry.row.handle = entry.row.handle, entry.handle
        enter(self, entry, *rest)
        entry.row.handle = handle

    return mock.patch.object(SettlementTable, "_enter", trusting)


def _never_merged() -> Any:
    def received(self: SettlementTable, row: Row, now: float, **_: Any) -> None:
        if (earlier := self._rows.get(row.key)) is not None:
            self.forget(earlier)
        self._rows[row.key] = row
        self._plan_visibility(row, now, now)

    return mock.patch.object(SettlementTable, "received", received)


def _not_kept_hidden() -> Any:
    plan = SettlementTable._plan_visibility

    def only_held(self: SettlementTable, row: Row, at: float, now: float) -> None:
        if row.want not in (Want.DELETE, Want.DEAD_LETTER):
            plan(self, row, at, now)

    return mock.patch.object(SettlementTable, "_plan_visibility", only_held)


def _failed_is_sent() -> Any:
    """What SQS does not list as failed is taken for sent."""

    def send(port: Calls, entries: Any) -> Any:
        results = carry_out_send(port, entries)
        return [None for _ in results]

    carry_out_send = carry_out_module._send
    return mock.patch.object(carry_out_module, "_send", send)


def _nobody_is_told() -> Any:
    return mock.patch.object(SettlementTable, "_miss", return_value=None)


def _forgets_to_go_on() -> Any:
    """A row that was refused is not planned again."""
    return mock.patch.object(SettlementTable, "_again", return_value=None)


def _changes_what_may_be_visible() -> Any:
    return mock.patch.object(Row, "may_be_visible", return_value=False)


MUTATIONS: dict[str, Callable[[], Any]] = {
    "renewals come at the end of the visibility timeout": lambda: mock.patch.object(
        settlement, "_RENEW_AT_SHARE", 1.0
    ),
    "renewals are not fenced from settlements": _no_fence,
    "one lane for all queues": _one_lane,
    "a dead letter in doubt is taken for sent": lambda: _on(Purpose.SEND, (Kind.IN_DOUBT,), None),
    "a refused dead letter ends the row": lambda: _on(Purpose.SEND, _REFUSED, _drop),
    "a failed delete is dropped": lambda: _on(Purpose.DELETE, _LATER, _drop),
    "a failed backoff is taken for done": lambda: _on(Purpose.HIDE, _LATER, None),
    "a failed renewal is taken for a loss": lambda: _on(Purpose.RENEW, _LATER, _lose),
    "responses about an older receipt handle count": _old_handles_count,
    "a message received again is a row of its own": _never_merged,
    "what waits for its delete or dead letter is not kept hidden": _not_kept_hidden,
    "no pause between tries": lambda: mock.patch.object(
        SettlementTable, "_pause", return_value=0.0
    ),
    "whatever was sent counts as taken": _failed_is_sent,
    "nobody is told of a loss": _nobody_is_told,
    "what failed is not tried again": _forgets_to_go_on,
    "a message is hidden although somebody else may have it": _changes_what_may_be_visible,
    "settlements wait for a minute": lambda: mock.patch.object(
        Keeper.__init__,
        "__kwdefaults__",
        {**(Keeper.__init__.__kwdefaults__ or {}), "linger_seconds": 60.0},
    ),
    "what was done is not remembered": lambda: mock.patch.object(
        Memory, "knows", return_value=False
    ),
    "a lease can be settled twice": lambda: mock.patch.object(Lease, "done", _done_again),
}


#: Gaps of the simulation. Take a name out when it is found.
NOT_FOUND = frozenset(
    {
        "renewals are not fenced from settlements",
        "a refused dead letter ends the row",
        "responses about an older receipt handle count",
        "what waits for its delete or dead letter is not kept hidden",
        "what was done is not remembered",
        "a lease can be settled twice",
    }
)


def _done_again(lease: Lease) -> bool:
    lease.want = Want.DELETE
    lease.keeper.settled(lease)
    return True


@contextmanager
def applied(name: str) -> Iterator[None]:
    """Patch a mutation in."""
    with ExitStack() as stack:
        stack.enter_context(MUTATIONS[name]())
        yield


def main() -> int:
    found = set()
    for name in MUTATIONS:
        try:
            with applied(name):
                failure = first_failure(range(HISTORIES))
            result = "not found" if failure is None else f"seed {failure[0]}: {failure[2][0]}"
        except Exception as exc:  # noqa: BLE001  # a crash is found, too
            result = f"raised {type(exc).__name__}"
        if result != "not found":
            found.add(name)
        print(f"{name}: {result}", flush=True)
    print(f"{len(found)} of {len(MUTATIONS)} found")
    return 0 if found >= set(MUTATIONS) - NOT_FOUND else 1


if __name__ == "__main__":
    sys.exit(main())
