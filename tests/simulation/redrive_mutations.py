"""Mistakes in the redrive that its random histories must find.

``test_redrive_histories`` makes each mistake in turn. Some mistakes are not here, because they only
cost time:

- A run renews no visibility timeouts. It loses messages, and receives them again.
- A run does not delete at once a message that an earlier run has sent. It deletes it at its end.
- A run believes the first empty receive. It ends as incomplete, and the next run goes on.

One more mistake is too rare for random histories. A message in doubt, which may have been sent, is
received again, and the ledger forgets the doubt. ``tests/unit/test_redrive_ledger.py`` tests this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from celery_sqs_backoff.redrive import sender
from celery_sqs_backoff.redrive.files import Journal
from celery_sqs_backoff.redrive.ledger import Ledger
from celery_sqs_backoff.sqs.calls import Calls, Results


def _without_kind(kind: str) -> Any:
    """Write no lines of this kind to the journal."""
    write = Journal.write

    def forgetful(self: Journal, is_: str, ids: Any, at: float = 0.0) -> None:
        if is_ != kind:
            write(self, is_, ids, at)

    return mock.patch.object(Journal, "write", forgetful)


def _failed_is_sent() -> Any:
    """Count all entries of a batch as sent if SQS has accepted one of them."""
    send = Calls.send

    def hopeful(self: Calls, entries: Any) -> Results:
        found = send(self, entries)
        if any(result is None for result in found):
            return [None for _ in found]
        return found

    return mock.patch.object(Calls, "send", hopeful)


def _doubt_is_unsent() -> Any:
    """Count messages as not sent if the response to the send gets lost."""

    def hopeful(self: Ledger, messages: Any, at: float, *, resend: Any) -> None:
        self.mark_unsent(messages)

    return mock.patch.object(Ledger, "mark_in_doubt", hopeful)


def _unsent_clears_doubt() -> Any:
    def trusting(self: Ledger, messages: Any) -> None:
        self._hold(messages)
        self._write("unsent", [message.id for message in messages])

    return mock.patch.object(Ledger, "mark_unsent", trusting)


def _known_is_dropped() -> Any:
    """Let no thread work on a message that the run has lost and receives again."""
    received = Ledger.enter

    def wrong(self: Ledger, claim: int, messages: Any, until: float) -> Any:
        known = {id_ for id_, row in self.rows.items() if row.handle is not None}
        ours, sent = received(self, claim, messages, until)
        return [message for message in ours if message.id not in known], sent

    return mock.patch.object(Ledger, "enter", wrong)


def _deleted_before_it_is_noted() -> Any:
    """Delete messages before the journal says that they are sent."""
    mark_sent = Ledger.mark_sent

    def late(self: Ledger, *args: Any, **options: Any) -> None:
        with mock.patch.object(self, "_write"):
            mark_sent(self, *args, **options)

    return mock.patch.object(Ledger, "mark_sent", late)


MUTATIONS: dict[str, Callable[[], Any]] = {
    "the journal does not say that a send begins": lambda: _without_kind("sending"),
    "the journal does not say that a send has ended": lambda: _without_kind("sent"),
    "a failed entry counts as sent": _failed_is_sent,
    "a send without a response counts as not sent": _doubt_is_unsent,
    "a message in doubt that is not sent again is no longer in doubt": _unsent_clears_doubt,
    "a message that is received again is not sent": _known_is_dropped,
    "a delete does not wait for the journal": _deleted_before_it_is_noted,
    "a failed call is not repeated": lambda: mock.patch.object(sender, "TRIES", 1),
}
