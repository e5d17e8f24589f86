"""One provider (or one tenant of it) as one worker sees it: a circuit breaker with a rate.

| state | event | next state |
|---|---|---|
| CLOSED | `failures` calls in a row fail within `probe_interval` after a success | RECOVERING |
| CLOSED | `failures` calls in a row fail, and no call succeeds for `probe_interval` | OPEN |
| OPEN | the probe is answered | RECOVERING |
| OPEN | the probe fails, or is lost | OPEN, and probes later |
| RECOVERING | `failures` calls in a row fail, no call succeeds for twice `probe_interval` | OPEN |
| RECOVERING | for a minute no message has waited or been hidden | CLOSED |

The failures in a row must come from two messages or more. If the provider has refused all of them
with a Retry-After, it is up. Then a minute counts in place of `probe_interval`.

While the gate is OPEN, the worker hides messages, and runs one at a time as a probe. While it is
RECOVERING, each message takes a token of :class:`.RecoveryRate` before it runs.

The worker also brings its hidden messages forward: it lets SQS show them before their holds end.
While the gate is OPEN, the worker brings forward one message at a time, for a probe. While the gate
is RECOVERING, it brings them all forward, bit by bit. If another worker receives the message for a
probe, that worker may probe with it. So all workers notice a recovery soon.

This module makes no calls and reads no clock. Times are passed in, as seconds of one clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from ..retry.budget import longest_hold, tolerant
from ..retry.decision import Reply
from ..retry.policies import Policy, RandomSource
from ..sqs.delivery import Delivery
from ..sqs.hidden import Hidden, Recall
from .rate import RecoveryRate
from .settings import Provider

#: At least this many messages must fail, because the cause may be in a single message.
MESSAGES = 2

#: A provider that has refused every call for this time counts as down.
REFUSED_SECONDS = 60.0

#: The pause between two probes is this share of the outage so far, but at least ``probe_interval``
#: and at most a minute. So the gate notices the end of an outage within a sixth of its length.
PAUSE_SHARE = 1 / 6
LONGEST_PAUSE_SECONDS = 60.0
#: A longer Retry-After counts as this time.
LONGEST_RETRY_AFTER_SECONDS = 3600.0

#: While the gate is OPEN, a message that is received again was probably brought forward by another
#: worker, so it may serve as an early probe. In a long outage holds also end without that. Then
#: such an early probe needs at least this pause after the last probe.
LATE_NEWS_SECONDS = 40.0

#: If the end of a probe is not reported within this time, another message may probe.
PROBE_EXPIRES_SECONDS = 600.0

#: While the gate is OPEN, a message is hidden for twice the outage so far, but at most for half an
#: hour. So it comes back within half an hour if its worker is killed. The hold is drawn between 3/4
#: and all of this time, so that messages do not come back together.
HOLD_FACTOR, LONGEST_HOLD_SECONDS, HOLD_JITTER_FROM = 2.0, 1800.0, 0.75

#: A policy's longest delay is read as its longest delay after this many failures.
MANY_FAILURES = 1000

#: While the gate is RECOVERING, a message waits in the worker if its turn is this near. Else it is
#: hidden, for a time between the next two limits.
NEAR_SECONDS = 2.0
SHORTEST_QUEUE_SECONDS, LONGEST_QUEUE_SECONDS = 30.0, 7200.0

#: While the gate is RECOVERING, a failed message comes back after half a second for each of its
#: receives, but at most half a minute. So a message that the provider never takes is tried less and
#: less often. A message with few receives left waits for half a minute, because each return costs a
#: receive. While the gate is CLOSED, a refused message comes back within half a minute.
SOON_SECONDS, LATEST_SECONDS = 0.5, 30.0

#: While a provider recovers, there are few calls. If half of them fail, some fail in a row by
#: chance. So the gate opens again only if no call has succeeded for this many times
#: ``probe_interval``.
RECOVERY_QUIET = 2

#: The recovery is over when no message has waited or been hidden for this time.
CALM_SECONDS = 60.0

#: If few messages wait in a worker, it brings forward more messages a second than its rate, because
#: other workers receive some of them. The factor doubles every half second, up to the second value.
PULL_DOUBLES_SECONDS, LONGEST_PULL = 0.5, 10.0

#: Pause between two searches for messages to bring forward.
RECOVERY_LOOK_SECONDS, OUTAGE_LOOK_SECONDS = 0.25, 1.0

#: A gate remembers at most this many running calls.
MOST_CALLS = 10_000

#: A stopping worker lets its hidden messages return at ten a second, or faster if this would take
#: more than three minutes. It leaves out a message that would return less than a minute earlier.
RETURNS_PER_SECOND, LONGEST_SPREAD_SECONDS, LEAST_GAIN_SECONDS = 10.0, 180.0, 60.0


class GateState(Enum):
    """The state of a gate. As in a circuit breaker, CLOSED lets all messages run."""

    CLOSED = "closed"
    OPEN = "open"
    RECOVERING = "recovering"


@dataclass(frozen=True, slots=True)
class Message:
    """A message that has come due, or has failed.

    Attributes:
        id: the message ID of SQS.
        receives: SQS's count of its receives, including this one.
        longest: most seconds that it may be hidden. At 0 or less it must not be hidden.
        policy_longest: the longest delay of its policy, in seconds. Early in an outage, the message
            is hidden for about this time.
        own_delay: a delay in seconds, drawn from its policy. It counts if the message cannot be
            brought forward, or if few receives are left.
        is_recallable: whether the worker may bring it forward while it is hidden.
        is_spared: whether it has used up half of the receives that its queue allows.
        next_is_last: whether its next receive is the last that its queue allows.
        must_run: whether SQS would move it to the dead-letter queue at its next receive.
    """

    id: str
    receives: int = 1
    longest: float = math.inf
    policy_longest: float = LONGEST_HOLD_SECONDS
    own_delay: float = 0.0
    is_recallable: bool = True
    is_spared: bool = False
    next_is_last: bool = False
    must_run: bool = False

    @classmethod
    def of(
        cls,
        delivery: Delivery,
        provider: Provider,
        backoff: Policy,
        *,
        retry_for: float | None,
        rng: RandomSource,
        now: float,
    ) -> Message:
        """Describe a message. Calls the user's policy. ``now`` is in seconds since the epoch."""
        policy = tolerant(backoff)
        stands = delivery.standing(retries=delivery.earlier_runs, now=now)
        return cls(
            delivery.message_id,
            receives=delivery.receive_count,
            longest=longest_hold(stands, retry_for=retry_for),
            policy_longest=policy.ceiling(MANY_FAILURES),
            own_delay=policy.delay_for(delivery.message_id, delivery.receive_count, rng),
            is_recallable=provider.recalls(backoff),
            is_spared=not delivery.has_receives_to_spare,
            next_is_last=delivery.is_next_the_last,
            must_run=delivery.is_last_before_sqs_moves_it,
        )


@dataclass(frozen=True, slots=True)
class Look:
    """The gate's decision about a message that has come due, or has failed.

    Attributes:
        hide_seconds: seconds to hide it before its next run. ``None`` = do not hide it.
        is_probe: whether it runs as the probe.
        waits: whether it must wait in the worker until :meth:`ProviderGate.turns` lets it run.
        recall: the permission to bring it forward while it is hidden, if any.
    """

    hide_seconds: float | None = None
    is_probe: bool = False
    waits: bool = False
    recall: Recall | None = None


_RUN, _PROBE, _WAIT = Look(), Look(is_probe=True), Look(waits=True)


class ProviderGate:
    """The gate of one provider in one worker. Not safe for threads.

    Arguments:
        rng: draws intervals and delays.
        failures: the number of failed calls in a row that opens the gate.
        probe_interval: mean seconds before the first probe. Before a later probe, the mean is at
            least this.

    Attributes:
        probe: the message that probes, or ``None``.
    """

    def __init__(
        self, rng: RandomSource, *, failures: int = 6, probe_interval: float = 5.0
    ) -> None:
        self.state = GateState.CLOSED
        self.hidden: Hidden[Any] = Hidden()
        self.rate = RecoveryRate()
        self.opened_at = self.next_probe_at = 0.0
        self._rng, self._most_failures, self._probe_interval = rng, failures, probe_interval
        self._began: dict[str, float] = {}
        self.probe: str | None = None
        self._probed_at = self._looked_at = self._busy_at = self._owed = 0.0
        self._pull = 1.0
        self._seen_at = math.inf
        self._answered_at = -math.inf
        self._reset_failures_in_a_row()

    # A message has come due

    def arrived(self, message: Message, now: float, *, waiting: int) -> Look:
        """Decide about a message that has come due. ``waiting``: others that wait for their turn.

        If the message may run, note that it runs.
        """
        has_time, is_probe = message.longest > 0, False
        if self.state is GateState.OPEN:
            is_probe = self._is_probe_due(now, is_news=message.receives > 1)
            if not is_probe and has_time and not message.must_run:
                return self._hide(message, self._choose_hold(message, now), now)
            if is_probe:
                self.probe, self._probed_at = message.id, now
        elif (
            self.state is GateState.RECOVERING
            and has_time
            and (waiting or not self.rate.take(1, now))
        ):
            self._busy_at = self.rate.short_at = now
            if message.must_run or not waiting or (waiting + 1) / self.rate.rate <= NEAR_SECONDS:
                return _WAIT
            return self._hide(message, self._choose_queue_hold(message), now)
        self.started(message.id, now)
        return _PROBE if is_probe else _RUN

    def started(self, message_id: str, now: float) -> None:
        """Note that a message runs."""
        self._seen_at = min(self._seen_at, now)
        if len(self._began) >= MOST_CALLS:
            del self._began[next(iter(self._began))]
        self._began[message_id] = now

    def begins(self, message_id: str, now: float) -> bool:
        """Return whether a message may run now that its turn has come. If so, note that it runs.

        If the gate has opened since ``arrived``, only the probe may run. Call ``arrived`` again for
        another message.
        """
        if self.state is GateState.OPEN and message_id != self.probe:
            return False
        self.started(message_id, now)
        return True

    def turns(self, waiting: int, now: float) -> int:
        """Return how many of the waiting messages may have their turn now, oldest first.

        While the gate is RECOVERING, each of them takes a token. In another state it is the turn of
        all messages. If the gate is OPEN, ``begins`` refuses them then.
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
        """Note the provider's reply to a run. ``None``: the run showed no reply, or did not begin.

        ``retry_after``: seconds of the reply's Retry-After.
        """
        began, is_probe = self._began.pop(message_id, now), message_id == self.probe
        if reply is Reply.ANSWERED:
            is_quiet = now >= self._answered_at + self._probe_interval
            was_away = is_quiet and self._in_a_row >= self._most_failures
            self._answered_at = now
            self._reset_failures_in_a_row()
            if is_probe:
                self._recover(now)
            elif was_away and self.state is GateState.RECOVERING:
                self.rate.start_again()
            elif self.state is GateState.OPEN:
                # A call that is not the probe has succeeded, so the provider may be back.
                self.next_probe_at = min(self.next_probe_at, now)
        elif is_probe:
            self._probe_later(now, retry_after)
        elif (
            reply is not None
            and self.state is not GateState.OPEN
            and self._have_enough_failed(message_id, reply)
        ):
            if now >= self._may_be_up_until():
                self.state, self.opened_at = GateState.OPEN, now
                self._probe_later(now, retry_after)
            elif self.state is GateState.CLOSED:
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
        only if the provider has refused the call by name, as with a 429 or a Retry-After.

        Arguments:
            delay: seconds for which its policy and a Retry-After would hide the message.
            floor: the message is hidden for at least this many seconds. Never above ``delay``.
        """
        message = replace(message, longest=max(delay, message.longest), own_delay=delay)
        hold = self._delay_after_failure(message, reply, delay, now, floor)
        # In a recovery, a message that has failed is not brought forward before its hold ends.
        earliest = hold if self.state is GateState.RECOVERING else floor
        return self._hide(message, hold, now, not_before=now + earliest)

    def _delay_after_failure(
        self, message: Message, reply: Reply | None, delay: float, now: float, floor: float
    ) -> float:
        if not message.is_recallable:
            return delay
        if self.state is GateState.OPEN:
            return max(delay, self._choose_hold(message, now)) if self.hidden.has_room else delay
        is_well = self.state is GateState.CLOSED
        if reply not in (Reply.REFUSED, Reply.FAILED) or (is_well and reply is Reply.FAILED):
            return delay
        if is_well:
            soon = self._rng.uniform(0.0, LATEST_SECONDS)
        else:
            soon = LATEST_SECONDS if message.is_spared else SOON_SECONDS * message.receives
        return min(delay, max(floor, min(soon, LATEST_SECONDS)))

    def _hide(
        self, message: Message, seconds: float, now: float, *, not_before: float = 0.0
    ) -> Look:
        """Return the decision to hide a message.

        A probe costs a receive, so a message with few receives left may probe only after its own
        delay.
        """
        recall = None
        if message.is_recallable:
            probe_from = now + message.own_delay if message.is_spared else 0.0
            recall = Recall(
                self.hidden, not_before, probe_from, message.next_is_last, message.receives
            )
        return Look(seconds, recall=recall)

    # Hidden messages

    def recalls(self, now: float, *, room: int, waiting: int = 0) -> list[Any]:
        """Return the hidden messages to bring forward now. Close the gate if a recovery is over.

        Arguments:
            now: seconds.
            room: most messages to bring forward.
            waiting: messages that wait for their turn. If they are few, other workers receive some
                of the messages, so this worker brings more forward.
        """
        seconds, self._looked_at = min(now - self._looked_at, 10.0), now
        if self.state is GateState.OPEN:
            return self._recall_probe(now) if room else []
        if self.state is GateState.CLOSED:
            return []
        if len(self.hidden):
            self._busy_at = now
        elif now > self._busy_at + CALM_SECONDS:
            self.state = GateState.CLOSED
            return []
        rate = self.rate.rate
        is_behind = waiting >= max(1.0, rate)
        if is_behind:
            self._pull = max(1.0, self._pull / 2)
        else:
            self._pull = min(LONGEST_PULL, self._pull * 2 ** (seconds / PULL_DOUBLES_SECONDS))
        pace = rate * self._pull
        self._owed = min(max(1.0, pace / 2), self._owed + seconds * pace)
        most = 0 if is_behind else min(int(self._owed), room)
        taken = self.hidden.furthest(most, now)
        self._owed -= len(taken)
        return taken

    def hand_over(self, now: float) -> list[tuple[Any, int]]:
        """Return hidden messages that SQS should show soon, because this worker stops.

        No other worker can bring them forward. Each comes with the seconds after which SQS should
        show it. While the gate is OPEN, a message stays hidden if its next receive is its last,
        because at its last receive it runs even if the provider is down. While the gate is CLOSED,
        all messages stay hidden for their own delays.
        """
        if self.state is GateState.CLOSED:
            return []
        is_down = self.state is GateState.OPEN
        movable = [each for each in self.hidden.all() if not (is_down and each[2].next_is_last)]
        spread = min(len(movable) / RETURNS_PER_SECOND, LONGEST_SPREAD_SECONDS)
        found = (
            (message, until, math.ceil(max(self._rng.uniform(0, spread), recall.not_before - now)))
            for message, until, recall in movable
        )
        return [
            (message, seconds)
            for message, until, seconds in found
            if now + seconds + LEAST_GAIN_SECONDS < until
        ]

    # Queries

    @property
    def seconds_to_look(self) -> float | None:
        """The seconds until the next call of ``recalls``, or ``None`` while the gate is closed."""
        pauses = {GateState.OPEN: OUTAGE_LOOK_SECONDS, GateState.RECOVERING: RECOVERY_LOOK_SECONDS}
        return pauses.get(self.state)

    def needs_probe(self, now: float) -> bool:
        """Return whether the gate is open and the next message that comes due is a probe."""
        return self.state is GateState.OPEN and self._is_probe_due(now, is_news=False)

    # Helpers

    def _is_probe_due(self, now: float, *, is_news: bool) -> bool:
        if self.probe is not None and now < self._probed_at + PROBE_EXPIRES_SECONDS:
            return False
        outage = now - self.opened_at
        pause = self._probe_interval
        if outage >= HOLD_JITTER_FROM * LONGEST_HOLD_SECONDS:
            pause = max(pause, LATE_NEWS_SECONDS)
        return now >= self.next_probe_at or (is_news and now >= self._probed_at + pause)

    def _probe_later(self, now: float, retry_after: float | None) -> None:
        self.probe, self._probed_at = None, now
        mean = max(self._probe_interval, PAUSE_SHARE * (now - self.opened_at))
        longest = max(LONGEST_PAUSE_SECONDS, self._probe_interval)
        pause = min(mean, longest) * self._rng.uniform(0.75, 1.25)
        self.next_probe_at = now + max(pause, min(retry_after or 0.0, LONGEST_RETRY_AFTER_SECONDS))

    def _reset_failures_in_a_row(self) -> None:
        self._in_a_row, self._all_refused = 0, True
        self._failed: set[str] = set()

    def _have_enough_failed(self, message_id: str, reply: Reply) -> bool:
        self._in_a_row += 1
        self._all_refused = self._all_refused and reply is Reply.REFUSED
        if len(self._failed) < MESSAGES:
            self._failed.add(message_id)
        return self._in_a_row >= self._most_failures and len(self._failed) == MESSAGES

    def _may_be_up_until(self) -> float:
        if self._all_refused:
            return max(self._answered_at, self._seen_at) + REFUSED_SECONDS
        is_recovering = self.state is GateState.RECOVERING
        return self._answered_at + (RECOVERY_QUIET if is_recovering else 1) * self._probe_interval

    def _recover(self, now: float) -> None:
        self.state, self.probe, self.rate = GateState.RECOVERING, None, RecoveryRate(now)
        self._answered_at = self._busy_at = self._looked_at = now
        self._owed = self._pull = 1.0
        self._reset_failures_in_a_row()

    def _choose_hold(self, message: Message, now: float) -> float:
        if not (message.is_recallable and self.hidden.has_room):
            return min(message.longest, max(0.0, self.next_probe_at - now) + message.own_delay)
        hold = max(message.policy_longest, HOLD_FACTOR * (now - self.opened_at))
        hold = min(hold, LONGEST_HOLD_SECONDS, message.longest)
        return hold * self._rng.uniform(HOLD_JITTER_FROM, 1.0)

    def _choose_queue_hold(self, message: Message) -> float:
        if not message.is_recallable:
            return min(message.longest, message.own_delay)
        turn = HOLD_FACTOR * (len(self.hidden) + 1) / self.rate.rate
        hold = min(max(SHORTEST_QUEUE_SECONDS, turn), LONGEST_QUEUE_SECONDS)
        return min(hold, message.longest)

    def _recall_probe(self, now: float) -> list[Any]:
        """Return the message to probe with, in a list, if a probe is due.

        The worker that receives it probes. It may be another worker, so plan the next probe, too.
        """
        message = self.hidden.to_probe_with(now) if self.needs_probe(now) else None
        if message is None:
            return []
        probed_at = self._probed_at
        self._probe_later(now, None)  # in case another worker receives this message
        self._probed_at = probed_at
        return [message]
