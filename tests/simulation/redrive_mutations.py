"""Mistakes in the redrive that its histories are to find.

``python -m tests.simulation.redrive_mutations`` patches each in, and runs histories until something
is wrong, 1,000 at most. It fails if one is not found.

Not among them, because only the cost differs: a run that renews no holds (what it loses is received
again), that does not delete at once what it has sent before (it does at its end), or does not try
once more at its end (the next one does), or that believes the first empty receive (it ends
as incomplete, and the next one goes on). Too rare for it, and in
``tests/unit/test_redrive_ledger.py``: a message that is lost while it is in doubt stays in doubt.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from celery_sqs_backoff.redrive import sender
from celery_sqs_backoff.redrive.files import Journal
from celery_sqs_backoff.redrive.ledger import Ledger, LedgerRow
from celery_sqs_backoff.sqs.calls import Calls, Sent

from .redrive_history import first_failure

__all__ = ["MUTATIONS", "applied"]

HISTORIES = 1_000


def _without_kind(kind: str) -> Any:
    """Lines of this kind are not written."""
    write = Journal.write

    def forgetful(self: Journal, is_: str, ids: Any, at: float = 0.0) -> None:
        if is_ != kind:
            write(self, is_, ids, at)

    return mock.patch.object(Journal, "write", forgetful)


def _failed_is_sent() -> Any:
    """What SQS failed in a batch counts as sent, if it has accepted another entry."""
    send = Calls.send

    def hopeful(self: Calls, entries: Any) -> list[Sent]:
        found = send(self, entries)
        if any(result.failure is None for result in found):
            return [Sent(message_id="m") for _ in found]
        return found

    return mock.patch.object(Calls, "send", hopeful)


def _doubt_is_unsent() -> Any:
    """A lost response is taken for a request that did not arrive."""

    def hopeful(self: Ledger, messages: Any, at: float, *, resend: Any) -> None:
        self.mark_unsent(messages)

    return mock.patch.object(Ledger, "mark_in_doubt", hopeful)


def _unsent_clears_doubt() -> Any:
    def trusting(self: Ledger, messages: Any) -> None:
        self._hold(messages)
        self._write("unsent", [message.id for message in messages])

    return mock.patch.object(Ledger, "mark_unsent", trusting)


def _owned_by_id() -> Any:
    def owned(self: Ledger, message: Any) -> LedgerRow | None:
        return self.rows.get(message.id)

    return mock.patch.object(Ledger, "_find_owned", owned)


def _known_is_dropped() -> Any:
    """Who receives a message again leaves it to who has lost it."""
    received = Ledger.enter

    def wrong(self: Ledger, claim: int, messages: Any, until: float) -> Any:
        known = {id_ for id_, row in self.rows.items() if row.handle is not None}
        ours, sent = received(self, claim, messages, until)
        return [message for message in ours if message.id not in known], sent

    return mock.patch.object(Ledger, "enter", wrong)


def _deleted_before_it_is_noted() -> Any:
    """The delete does not wait for the journal."""
    mark_sent = Ledger.mark_sent

    def late(self: Ledger, *args: Any, **options: Any) -> None:
        with mock.patch.object(self, "_write"):
            mark_sent(self, *args, **options)

    return mock.patch.object(Ledger, "mark_sent", late)


def _journal_forgets(is_forgotten: Callable[[float | None], bool]) -> Any:
    read = Journal._read

    def forgetful(self: Journal) -> None:
        read(self)
        self.past = {id_: at for id_, at in self.past.items() if not is_forgotten(at)}

    return mock.patch.object(Journal, "_read", forgetful)


def _own_return_takes_a_place() -> Any:
    return mock.patch.object(Ledger, "places", property(lambda self: self.looked_at + 1))


def _two_deletes_count_twice() -> Any:
    mark_deleted = Ledger.mark_deleted

    def trusting(self: Ledger, ids: Any, *, name_late: bool) -> None:
        found = tuple(ids)
        assert all(id_ in self.rows for id_ in found)
        mark_deleted(self, found, name_late=name_late)

    return mock.patch.object(Ledger, "mark_deleted", trusting)


MUTATIONS: dict[str, Callable[[], Any]] = {
    "a send is not noted before": lambda: _without_kind("sending"),
    "a send is not noted after": lambda: _without_kind("sent"),
    "an end is not noted": lambda: _without_kind("ended"),
    "what SQS failed counts as sent": _failed_is_sent,
    "a lost response counts as unsent": _doubt_is_unsent,
    "unsent once is unsent for ever": _unsent_clears_doubt,
    "a hold is known by its id": _owned_by_id,
    "who receives a message again leaves it alone": _known_is_dropped,
    "a delete does not wait for the journal": _deleted_before_it_is_noted,
    "the journal forgets what was sent": lambda: _journal_forgets(lambda at: at is None),
    "the journal forgets what is in doubt": lambda: _journal_forgets(lambda at: at is not None),
    "a place too few": _own_return_takes_a_place,
    "no second try": lambda: mock.patch.object(sender, "TRIES", 1),
    "two deletes of one message": _two_deletes_count_twice,
}


@contextmanager
def applied(name: str) -> Iterator[None]:
    """Patch a mutation in."""
    with ExitStack() as stack:
        stack.enter_context(MUTATIONS[name]())
        yield


def main() -> int:
    missed = []
    for name in MUTATIONS:
        with applied(name):
            failure = first_failure(range(HISTORIES))
        if failure is None:
            missed.append(name)
        print(f"{name}: {'not found' if failure is None else f'seed {failure[0]}'}", flush=True)
    print(f"{len(MUTATIONS) - len(missed)} of {len(MUTATIONS)} found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
