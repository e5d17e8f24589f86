"""Decides from failures in a row whether a provider is down, or only slow."""

from __future__ import annotations

import math

from ..retry.decision import Reply

#: At least this many messages must fail, because the cause may be in a single message.
MESSAGES = 2

#: If all failures in a row are refusals, the provider counts as down when its last success is this
#: long ago.
REFUSED_SECONDS = 60.0

#: While a provider recovers, there are few calls. If half of them fail, some fail in a row by
#: chance. So it counts as down again only if no call has succeeded for this many times
#: ``probe_interval``.
RECOVERY_QUIET = 2


class FailuresInARow:
    """The failed calls to a provider since the last success. Times are seconds of one clock.

    Arguments:
        enough: the number of failed calls in a row after which the gate acts.
        quiet: the provider counts as down if no call has succeeded for this many seconds.
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
        """Whether there are enough failures, of enough messages."""
        return self._number >= self._enough and len(self._messages) == MESSAGES

    def end(self, now: float) -> bool:
        """Note a success. Return whether enough calls had failed, and none succeeded for long."""
        was_quiet = self.are_enough and now >= self._answered_at + self._quiet
        self._answered_at = self._failing_since = now
        self._forget()
        return was_quiet

    def are_an_outage(self, now: float, *, is_recovering: bool) -> bool:
        """Return whether the provider is down. If it refuses calls by name, it is up at first."""
        if self._all_refused:
            return now >= self._failing_since + REFUSED_SECONDS
        return now >= self._answered_at + (RECOVERY_QUIET if is_recovering else 1) * self._quiet
