"""The gate of one provider in one worker, which is a circuit breaker with a rate.

If the provider has a ``key``, each tenant has a gate of its own.

| state | event | next state |
|---|---|---|
| CLOSED | `failures` calls in a row fail within `probe_interval` after a success | RECOVERING |
| CLOSED | `failures` calls in a row fail, and no call succeeds for `probe_interval` | OPEN |
| OPEN | the probe is answered | RECOVERING |
| OPEN | the probe fails, or is lost | OPEN, and probes later |
| RECOVERING | `failures` calls in a row fail, no call succeeds for twice `probe_interval` | OPEN |
| RECOVERING | for a minute no message has waited or been hidden | CLOSED |

The failures in a row must come from two messages or more. If the provider has refused all of these
calls with a Retry-After, the provider is up. In this case, a minute counts in place of
`probe_interval` or twice `probe_interval`.

While the gate is OPEN, the worker hides messages, and runs one at a time as a probe. While the gate
is RECOVERING, each message takes a token of :class:`.RecoveryRate` before it runs.

A hold is the time for which SQS hides a message. The worker can bring a hidden message forward: it
lets SQS show the message before its hold ends. While the gate is OPEN, the worker brings forward
one message at a time, for a probe. If another worker receives this message, that worker may probe
with it. So all workers notice a recovery soon. While the gate is RECOVERING, the worker brings its
hidden messages forward as fast as they can run.

This module makes no calls and reads no clock. Times are passed in, as seconds of one clock.
"""

from __future__ import annotations

import math
from dataclasses import replace
from enum import Enum
from typing import Any

from ..retry.decision import Reply
from ..retry.policies import RandomSource
from ..sqs.hidden import Hidden
from .failures import FailuresInARow
from .holds import (
    Look,
    Message,
    Pull,
    hide,
    hold_after_failure,
    hold_until_turn,
    hold_while_down,
    spread_returns,
)
from .rate import RecoveryRate

#: The mean pause between two probes is this share of the outage so far, for example 10 s after one
#: minute. The mean is at most a minute, but never below ``probe_interval``. So the gate notices the
#: end of a long outage within about a sixth of the outage's length.
PAUSE_SHARE = 1 / 6
LONGEST_PAUSE_SECONDS = 60.0
#: A longer Retry-After counts as this many seconds.
LONGEST_RETRY_AFTER_SECONDS = 3600.0

#: While the gate is OPEN, the worker may receive a message that was received before. Perhaps
#: another worker has noticed a recovery, and brings messages forward. So the gate probes early with
#: such a message, if the gate's last probe is at least ``probe_interval`` ago.
#:
#: When an outage has lasted for ``LATE_OUTAGE_SECONDS`` (3/4 of half an hour, the first time at
#: which a hold of half an hour may end after its jitter), messages also return because their holds
#: have ended. From this time on, the gate probes early only ``LATE_PAUSE_SECONDS`` after its last
#: probe, or if many messages have returned since that probe. Many are ``EARLY_SHARE`` of the
#: worker's hidden messages.
LATE_OUTAGE_SECONDS, LATE_PAUSE_SECONDS, EARLY_SHARE = 1350.0, 40.0, 0.1

#: If the end of a probe is not reported within this time, another message may probe.
PROBE_EXPIRES_SECONDS = 600.0

#: While the gate is RECOVERING, a message waits in the worker if its turn comes within this many
#: seconds, or if no other message waits. Otherwise the worker hides the message.
NEAR_SECONDS = 2.0

#: The recovery is over when for this many seconds no message has waited or been hidden.
CALM_SECONDS = 60.0

#: Pause between two searches for messages to bring forward, while RECOVERING and while OPEN.
RECOVERY_LOOK_SECONDS, OUTAGE_LOOK_SECONDS = 0.25, 1.0

#: A gate remembers at most this many running calls.
MOST_CALLS = 10_000


class GateState(Enum):
    """The state of a gate. As in a circuit breaker, CLOSED lets all messages run."""

    CLOSED = "closed"
    OPEN = "open"
    RECOVERING = "recovering"


_RUN, _PROBE, _WAIT = Look(), Look(is_probe=True), Look(waits=True)


class ProviderGate:
    """The gate of one provider in one worker. Not thread-safe.

    Arguments:
        rng: draws intervals and delays.
        failures: the number of failed calls in a row that opens the gate.
        probe_interval: mean seconds from the opening to the first probe. The mean pause between
            later probes is at least as long.

    Attributes:
        probe: the ID of the message that runs as the probe, or ``None``.
    """

    def __init__(
        self, rng: RandomSource, *, failures: int = 6, probe_interval: float = 5.0
    ) -> None:
        self.state = GateState.CLOSED
        self.hidden: Hidden[Any] = Hidden()
        self.rate, self._pull = RecoveryRate(), Pull()
        self.opened_at = self.next_probe_at = 0.0
        self._rng, self._probe_interval = rng, probe_interval
        self._began: dict[str, float] = {}
        self.probe: str | None = None
        self._probed_at = self._busy_at = 0.0
        self._retry_at, self._seen_again = 0.0, 0
        self._failures = FailuresInARow(failures, probe_interval)

    # A message is due

    def arrived(
        self, message: Message, now: float, *, waiting: int, needs_slot: bool = False
    ) -> Look:
        """Decide whether a message that is due runs, waits or is hidden.

        If the message runs, the gate notes the run.

        Arguments:
            message: the message that the worker has received.
            now: seconds.
            waiting: the number of other messages that wait in the worker for their turn.
            needs_slot: whether the provider has an agreed rate. Then each message waits for a slot,
                and takes its token in :meth:`turns`.
        """
        has_time, is_probe = message.longest > 0, False
        if self.state is GateState.OPEN:
            self._seen_again += message.receives > 1
            is_probe = self.needs_probe(now, is_news=message.receives > 1)
            if is_probe:
                self.probe, self._probed_at = message.id, now
            elif has_time and not message.must_run:
                return hide(message, self._choose_hold(message, now), self.hidden, now)
        elif (
            self.state is GateState.RECOVERING
            and has_time
            and (waiting or needs_slot or not self.rate.take(1, now))
        ):
            # With an agreed rate, perhaps the message waits only for its slot. This wait does not
            # show that the rate of the recovery is too low.
            if not needs_slot:
                self._busy_at = self.rate.short_at = now
            if message.must_run or not waiting or (waiting + 1) / self.rate.rate <= NEAR_SECONDS:
                return _WAIT
            turn = (len(self.hidden) + 1) / self.rate.rate
            return hide(message, hold_until_turn(message, turn), self.hidden, now)
        self.started(message.id, now)
        return _PROBE if is_probe else _RUN

    def started(self, message_id: str, now: float) -> None:
        """Note that a message runs."""
        if len(self._began) >= MOST_CALLS:
            del self._began[next(iter(self._began))]
        self._began[message_id] = now

    def begins(self, message_id: str, now: float) -> bool:
        """Return whether a message may run now that its turn has come. If so, note that it runs.

        If the gate has opened since ``arrived``, only the probe may run. For any other message,
        call ``arrived`` again.
        """
        if self.state is GateState.OPEN and message_id != self.probe:
            return False
        self.started(message_id, now)
        return True

    def turns(self, waiting: int, now: float) -> int:
        """Return how many of the waiting messages have their turn now, oldest first.

        While the gate is RECOVERING, each of these messages takes a token. In the other states, all
        waiting messages have their turn. The caller must ask :meth:`begins` for each of them, which
        refuses them while the gate is OPEN.
        """
        if self.state is not GateState.RECOVERING:
            return waiting
        taken = self.rate.take(waiting, now)
        if taken < waiting:
            self._busy_at = now
        return taken

    # A run has ended

    def ended(
        self, message_id: str, reply: Reply | None, now: float, *, retry_after: float | None = None
    ) -> None:
        """Note the provider's reply to a run.

        Arguments:
            reply: ``None`` = the end of the run shows no reply, or the run did not begin.
            retry_after: seconds of the reply's Retry-After.
        """
        began, is_probe = self._began.pop(message_id, now), message_id == self.probe
        if reply is Reply.ANSWERED:
            was_quiet = self._failures.end(now)
            if is_probe:
                self._recover(now)
            elif self.state is GateState.OPEN:
                # A call that is not the probe has succeeded, so the provider may be back. Let the
                # next message probe.
                self.next_probe_at = self._retry_at = min(self.next_probe_at, now)
            elif self.state is GateState.RECOVERING and was_quiet:
                self.rate.start_again()
        elif is_probe:
            self._probe_later(now, retry_after)
        elif reply is not None and self.state is not GateState.OPEN:
            is_recovering = self.state is GateState.RECOVERING
            self._failures.add(message_id, reply, now)
            if self._failures.are_enough:
                if self._failures.are_an_outage(now, is_recovering=is_recovering):
                    self.state, self.opened_at = GateState.OPEN, now
                    self._probe_later(now, retry_after)
                elif not is_recovering:
                    self._recover(now)
        if reply is not None and self.state is GateState.RECOVERING and not is_probe:
            self.rate.ended(reply, began, now)

    def failed(
        self, message: Message, reply: Reply | None, delay: float, now: float, *, floor: float
    ) -> Look:
        """Decide for how long to hide a message that has failed. Call it after ``ended``.

        While the gate is OPEN, the message is hidden for ``delay`` or longer, because it could not
        run earlier. While the gate is RECOVERING, the time may be shorter than ``delay``, because
        the rate decides when the message runs. While the gate is CLOSED, the time may be shorter
        only if the provider is up and has refused the call for now, as with a 429.

        Arguments:
            delay: seconds to hide the message by its policy, or by a Retry-After if that is longer.
            floor: the least seconds to hide the message, at most ``delay``.
        """
        message = replace(message, longest=max(delay, message.longest), own_delay=delay)
        is_recovering = self.state is GateState.RECOVERING
        if self.state is GateState.OPEN:
            hold = max(delay, self._choose_hold(message, now)) if self._keeps(message) else delay
        else:
            hold = hold_after_failure(
                message, reply, delay, self._rng, floor=floor, is_recovering=is_recovering
            )
        # In a recovery, a message that has failed is not brought forward before its hold ends.
        earliest = now + (hold if is_recovering else floor)
        return hide(message, hold, self.hidden, now, not_before=earliest)

    # Hidden messages

    def recalls(self, now: float, *, room: int, waiting: int = 0) -> list[Any]:
        """Return the hidden messages to bring forward now. Close the gate if a recovery is over.

        Arguments:
            now: seconds.
            room: bring forward at most this number of messages.
            waiting: the number of messages that wait in the worker for their turn.
        """
        if self.state is GateState.OPEN:
            message = self.hidden.to_probe_with(now) if room and self.needs_probe(now) else None
            if message is None:
                return []
            # If another worker receives the message, this gate does not learn how the probe ends.
            # So plan the next probe now.
            self._plan_probe(now)
            return [message]
        if self.state is GateState.CLOSED:
            return []
        if len(self.hidden):
            self._busy_at = now
        elif now > self._busy_at + CALM_SECONDS:
            self.state = GateState.CLOSED
            return []
        most = self._pull.count(self.rate.rate, waiting, now)
        taken = self.hidden.furthest(min(most, room), now)
        self._pull.took(len(taken))
        return taken

    def hand_over(self, now: float) -> list[tuple[Any, int]]:
        """Return hidden messages that SQS should show soon, because this worker stops.

        Each message comes with the seconds after which SQS should show it. While the gate is
        CLOSED, the result is empty, so all messages stay hidden until their holds end.
        """
        if self.state is GateState.CLOSED:
            return []
        return spread_returns(self.hidden, now, self._rng, is_down=self.state is GateState.OPEN)

    # Queries

    @property
    def seconds_to_look(self) -> float | None:
        """The seconds until the next call of ``recalls``, or ``None`` while the gate is closed."""
        pauses = {GateState.OPEN: OUTAGE_LOOK_SECONDS, GateState.RECOVERING: RECOVERY_LOOK_SECONDS}
        return pauses.get(self.state)

    def needs_probe(self, now: float, *, is_news: bool = False) -> bool:
        """Return whether the gate is OPEN and the next message that is due runs as the probe.

        ``is_news``: whether this message was received before, so that it may probe early. See
        ``LATE_OUTAGE_SECONDS``.
        """
        is_probing = self.probe is not None and now < self._probed_at + PROBE_EXPIRES_SECONDS
        if self.state is not GateState.OPEN or is_probing or now < self._retry_at:
            return False
        pause, is_late = now - self._probed_at, now >= self.opened_at + LATE_OUTAGE_SECONDS
        is_unsure = is_late and pause < LATE_PAUSE_SECONDS
        needed = (EARLY_SHARE * len(self.hidden) or math.inf) if is_unsure else 1
        is_early = self._seen_again >= needed and pause >= self._probe_interval
        return now >= self.next_probe_at or (is_news and is_early)

    # Helpers

    def _probe_later(self, now: float, retry_after: float | None) -> None:
        self.probe, self._probed_at, self._seen_again = None, now, 0
        self._retry_at = now + min(retry_after or 0.0, LONGEST_RETRY_AFTER_SECONDS)
        self._plan_probe(now)

    def _plan_probe(self, now: float) -> None:
        share = min(PAUSE_SHARE * (now - self.opened_at), LONGEST_PAUSE_SECONDS)
        pause = max(self._probe_interval, share) * self._rng.uniform(0.75, 1.25)
        self.next_probe_at = max(now + pause, self._retry_at)

    def _recover(self, now: float) -> None:
        self.state, self.probe = GateState.RECOVERING, None
        self.rate, self._pull = RecoveryRate(now), Pull(now)
        self._busy_at = now
        self._failures.end(now)

    def _keeps(self, message: Message) -> bool:
        return message.is_recallable and self.hidden.has_room

    def _choose_hold(self, message: Message, now: float) -> float:
        if self._keeps(message):
            return hold_while_down(message, now - self.opened_at, self._rng)
        return min(message.longest, max(0.0, self.next_probe_at - now) + message.own_delay)
