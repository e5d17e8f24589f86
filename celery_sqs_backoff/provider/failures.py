"""Decides from failed calls in a row whether a provider is down."""

from __future__ import annotations

import math

from ..retry.decision import Reply

#: The failed calls must come from at least this many messages. If only one message fails, the cause
#: may be this message and not the provider.
MESSAGES = 2

#: A provider that refuses calls (``Reply.REFUSED``) is up, and asks to wait. If it has refused all
#: calls in a row, it counts as down only when its last success is this many seconds ago.
#: If no call has ever succeeded, the first failed call counts instead.
REFUSED_SECONDS = 60.0

#: While a provider recovers, the worker makes few calls. If half of these calls fail, several may
#: fail in a row by chance. So the provider counts as down again only if no call has succeeded for
#: this many times ``quiet`` (:class:`FailuresInARow`).
RECOVERY_QUIET = 2


class FailuresInARow:
    """The failed calls to a provider since the last success. Times are seconds of one clock.

    Arguments:
        enough: the least number of failed calls in a row that can mean an outage.
        quiet: these calls mean an outage if no call has succeeded for this many seconds.
    """

    def __init__(self, enough: int, quiet: float) -> None:
        self._enough, self._quiet = enough, quiet
        self._answered_at = -math.inf
        #: The time of the last success. Without a success, the time of the first failure.
        self._failing_since = math.inf
        self._forget()

    def _forget(self) -> None:
        self._number, self._all_refused = 0, True
        self._messages: set[str] = set()

    def add(self, message_id: str, reply: Reply, now: float) -> None:
        """Note a failed call."""
        self._number += 1
        self._all_refused = self._all_refused and reply is Reply.REFUSED
        self._failing_since = min(self._failing_since, now)
        if len(self._messages) < MESSAGES:
            self._messages.add(message_id)

    @property
    def are_enough(self) -> bool:
        """Whether enough calls in a row have failed, and they came from at least two messages."""
        return self._number >= self._enough and len(self._messages) == MESSAGES

    def end(self, now: float) -> bool:
        """Note a success. Return whether it ends a long series of failures.

        In a long series, enough calls have failed, and no call has succeeded for ``quiet`` seconds.
        """
        was_quiet = self.are_enough and now >= self._answered_at + self._quiet
        self._answered_at = self._failing_since = now
        self._forget()
        return was_quiet

    def are_an_outage(self, now: float, *, is_recovering: bool) -> bool:
        """Return whether the provider counts as down. Call this only if ``are_enough`` is true."""
        if self._all_refused:
            return now >= self._failing_since + REFUSED_SECONDS
        return now >= self._answered_at + (RECOVERY_QUIET if is_recovering else 1) * self._quiet
