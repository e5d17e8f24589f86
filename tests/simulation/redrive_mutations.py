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
from celery_sqs_backoff.redrive.book import Book
from celery_sqs_backoff.redrive.journal import Journal
from celery_sqs_backoff.redrive.ledger import Ledger, Receipt, State
from celery_sqs_backoff.redrive.past import Entry, Past

from .redrive_history import first_failure

__all__ = ["MUTATIONS", "applied"]

HISTORIES = 1_000


def _without_kind(kind: str) -> Any:
    """Entries of this kind are not written."""
    write = Journal.write

    def forgetful(self: Journal, entry: Entry) -> None:
        if entry.kind != kind:
            write(self, entry)

    return mock.patch.object(Journal, "write", forgetful)


def _failed_is_sent() -> Any:
    send = sender.send

    def hopeful(*args: Any) -> sender.Result:
        found = send(*args)
        if found.sent:
            found.sent += [message for message, _ in found.again]
            found.again = []
        return found

    return mock.patch("celery_sqs_backoff.redrive.delivery.send", hopeful)


def _doubt_is_unsent() -> Any:
    """A lost response is taken for a request that did not arrive."""
    send = sender.send

    def hopeful(*args: Any) -> sender.Result:
        found = send(*args)
        found.again += found.in_doubt
        found.in_doubt = []
        return found

    return mock.patch("celery_sqs_backoff.redrive.delivery.send", hopeful)


def _unsent_clears_doubt() -> Any:
    was_unsent = Ledger.was_unsent

    def trusting(self: Ledger, ids: Any) -> Entry:
        found = tuple(ids)
        was_unsent(self, found)
        return Entry("unsent", found)

    return mock.patch.object(Ledger, "was_unsent", trusting)


def _owned_by_id() -> Any:
    def owns(self: Ledger, id_: str, handle: str, now: float, margin: float) -> bool:
        row = self.rows.get(id_)
        return row is not None and row.state in (State.SEEN, State.IN_DOUBT)

    return mock.patch.object(Ledger, "owns", owns)


def _known_is_dropped() -> Any:
    """Who receives a message again leaves it to who has lost it."""
    received = Ledger.received

    def wrong(self: Ledger, id_: str, handle: str, until: float) -> Receipt:
        was_known = id_ in self.rows
        found = received(self, id_, handle, until)
        return Receipt.KNOWN if was_known and found is Receipt.NEW else found

    return mock.patch.object(Ledger, "received", wrong)


def _deleted_before_it_is_noted() -> Any:
    """The delete does not wait for the journal."""
    has_sent = Book.has_sent

    def late(self: Book, messages: Any, *args: Any, **options: Any) -> None:
        write, self._write = self._write, lambda entry: None  # type: ignore[method-assign]
        try:
            has_sent(self, messages, *args, **options)
        finally:
            self._write = write  # type: ignore[method-assign]

    return mock.patch.object(Book, "has_sent", late)


def _past_forgets(what: str) -> Any:
    apply = Past.apply

    def forgetful(self: Past, entry: Entry) -> None:
        apply(self, entry)
        getattr(self, what).clear()

    return mock.patch.object(Past, "apply", forgetful)


def _own_return_takes_a_place() -> Any:
    return mock.patch.object(Ledger, "places", property(lambda self: self.looked_at + 1))


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
    "the journal forgets what was sent": lambda: _past_forgets("sent"),
    "the journal forgets what is in doubt": lambda: _past_forgets("in_doubt"),
    "a place too few": _own_return_takes_a_place,
    "no second try": lambda: mock.patch("celery_sqs_backoff.redrive.delivery.TRIES", 1),
    "two deletes of one message": lambda: mock.patch.object(
        Ledger, "has_deleted", _delete_trusting
    ),
}

_has_deleted = Ledger.has_deleted


def _delete_trusting(self: Ledger, ids: Any) -> Entry:
    found = tuple(ids)
    assert all(id_ in self.rows for id_ in found)
    return _has_deleted(self, found)


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
