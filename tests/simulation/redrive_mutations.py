"""Mistakes in the redrive that its histories are to find: ``test_redrive_histories`` plants each.

Not among them, because only the cost differs: a run that renews no holds (what it loses is received
again), that does not delete at once what it has sent before (it does at its end), or that believes
the first empty receive (it ends as incomplete, and the next one goes on). Too rare, and in
``tests/unit/test_redrive_ledger.py``: a message that is lost while it is in doubt stays in doubt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from celery_sqs_backoff.redrive import sender
from celery_sqs_backoff.redrive.files import Journal
from celery_sqs_backoff.redrive.ledger import Ledger
from celery_sqs_backoff.sqs.calls import Calls, Sent


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


MUTATIONS: dict[str, Callable[[], Any]] = {
    "a send is not noted before": lambda: _without_kind("sending"),
    "a send is not noted after": lambda: _without_kind("sent"),
    "what SQS failed counts as sent": _failed_is_sent,
    "a lost response counts as unsent": _doubt_is_unsent,
    "unsent once is unsent for ever": _unsent_clears_doubt,
    "who receives a message again leaves it alone": _known_is_dropped,
    "a delete does not wait for the journal": _deleted_before_it_is_noted,
    "no second try": lambda: mock.patch.object(sender, "TRIES", 1),
}
