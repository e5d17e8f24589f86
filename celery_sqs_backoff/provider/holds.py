"""Decides how long messages are hidden while their provider is down or recovers.

A hold is the time for which SQS hides a message. A hold may be long, because the worker can bring
most messages forward (``Message.is_recallable``): it ends their holds early. If the worker is
killed, nothing ends the holds of its messages early. OPEN, RECOVERING and CLOSED are the states of
the provider's gate (:mod:`.gate`). Times are seconds of one clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..retry.budget import longest_hold, tolerant
from ..retry.decision import Reply
from ..retry.policies import Policy, RandomSource
from ..sqs.delivery import Delivery
from ..sqs.hidden import Hidden, Recall
from .settings import Provider

#: While the gate is OPEN, a message is hidden for twice the outage so far, or for the longest delay
#: of its policy if that is longer. The hold is at most half an hour, so that the message comes back
#: within this time if its worker is killed. The hold is drawn between 3/4 and all of the resulting
#: time, so that messages do not come back together.
HOLD_FACTOR, LONGEST_HOLD_SECONDS, HOLD_JITTER_FROM = 2.0, 1800.0, 0.75

#: A policy's ceiling after this many failures counts as its longest delay.
MANY_FAILURES = 1000

#: While the gate is RECOVERING, a message is hidden for twice the time until its turn. The hold is
#: at least the first and at most the second of these times.
SHORTEST_QUEUE_SECONDS, LONGEST_QUEUE_SECONDS = 30.0, 7200.0

#: While the gate is RECOVERING, a failed message comes back after half a second times the number of
#: its receives, but at most half a minute. For example, after its tenth receive it waits 5 s. So a
#: message that the provider never accepts is tried less and less often. A message with few receives
#: left waits for half a minute, because each return costs a receive. While the gate is CLOSED, a
#: refused message comes back at a random time within half a minute.
SOON_SECONDS, LATEST_SECONDS = 0.5, 30.0

#: Other workers receive some of the messages that a worker brings forward. So a worker in which few
#: messages wait brings forward more messages a second than its rate of calls. It multiplies the
#: rate by a factor, which doubles every half second, up to ten.
PULL_DOUBLES_SECONDS, LONGEST_PULL = 0.5, 10.0

#: A stopping worker lets its hidden messages return at ten a second, or faster if this would take
#: more than three minutes. It leaves out a message that would return less than a minute before its
#: hold ends.
RETURNS_PER_SECOND, LONGEST_SPREAD_SECONDS, LEAST_GAIN_SECONDS = 10.0, 180.0, 60.0


@dataclass(frozen=True, slots=True)
class Message:
    """A message that is due to run, or that has failed.

    Attributes:
        id: the message ID of SQS.
        receives: SQS's count of its receives, including the current receive.
        longest: longest time in seconds that it may be hidden. At 0 or less it must not be hidden.
        policy_longest: the longest delay of its policy, in seconds. Early in an outage, the message
            is hidden for about this time, but at most half an hour.
        own_delay: a delay in seconds, drawn from its policy. It sets the hold of a message
            that cannot be brought forward. A message with few receives left probes only after this
            delay.
        is_recallable: whether the worker may bring it forward while it is hidden.
        is_spared: whether it has used up half of the receives that its queue allows.
        next_is_last: whether its next receive is the last that its queue allows.
        must_run: whether SQS would move it to the dead-letter queue at its next receive. Then
            the worker must not hide it.
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
        """Describe a received message. This calls the user's policy to compute the message's
        delays.

        ``now``: seconds since the epoch.
        """
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
    """The gate's decision about a message that is due to run, or that has failed.

    Attributes:
        hide_seconds: seconds to hide it before its next run. ``None`` = do not hide it.
        is_probe: whether it runs as the probe.
        waits: whether it must wait in the worker until :meth:`.ProviderGate.turns` lets it run.
        recall: the permission to bring it forward while it is hidden, if any.
    """

    hide_seconds: float | None = None
    is_probe: bool = False
    waits: bool = False
    recall: Recall | None = None


def hide(
    message: Message, seconds: float, among: Hidden[Any], now: float, *, not_before: float = 0.0
) -> Look:
    """Return the decision to hide a message.

    A probe costs a receive. So a message with few receives left may probe only after its own delay,
    when it would use up a receive anyway.

    Arguments:
        seconds: for how long to hide it.
        among: the hidden messages of its provider. The worker can bring them forward.
        now: the time.
        not_before: the time before which it must not be brought forward.
    """
    recall = None
    if message.is_recallable:
        probe_from = now + message.own_delay if message.is_spared else 0.0
        recall = Recall(among, not_before, probe_from, message.next_is_last, message.receives)
    return Look(seconds, recall=recall)


def hold_while_down(message: Message, outage: float, rng: RandomSource) -> float:
    """Return for how many seconds to hide a message while its provider is down.

    Call this only for a message that the worker can bring forward after a successful probe.
    ``outage``: seconds since the gate opened.
    """
    hold = max(message.policy_longest, HOLD_FACTOR * outage)
    hold = min(hold, LONGEST_HOLD_SECONDS, message.longest)
    return hold * rng.uniform(HOLD_JITTER_FROM, 1.0)


def hold_until_turn(message: Message, turn: float) -> float:
    """Return for how many seconds to hide a message while its provider recovers.

    ``turn``: estimated seconds from now until the message's turn.
    """
    if not message.is_recallable:
        return min(message.longest, message.own_delay)
    hold = min(max(SHORTEST_QUEUE_SECONDS, HOLD_FACTOR * turn), LONGEST_QUEUE_SECONDS)
    return min(hold, message.longest)


def hold_after_failure(
    message: Message,
    reply: Reply | None,
    delay: float,
    rng: RandomSource,
    *,
    floor: float,
    is_recovering: bool,
) -> float:
    """Return for how many seconds to hide a failed message while its provider is not down.

    See :meth:`.ProviderGate.failed` for the reasons and arguments.
    """
    is_quick = reply is Reply.REFUSED or (is_recovering and reply is Reply.FAILED)
    if not (message.is_recallable and is_quick):
        return delay
    if not is_recovering:
        soon = rng.uniform(0.0, LATEST_SECONDS)
    else:
        soon = LATEST_SECONDS if message.is_spared else SOON_SECONDS * message.receives
    return min(delay, max(floor, min(soon, LATEST_SECONDS)))


class Pull:
    """Limits how many hidden messages a worker brings forward while its provider recovers."""

    def __init__(self, now: float = 0.0) -> None:
        self._factor, self._owed, self._counted_at = 1.0, 1.0, now

    def count(self, rate: float, waiting: int, now: float) -> int:
        """Return how many messages the worker may bring forward now, at most.

        The caller then passes the number that it has brought forward to :meth:`took`.

        Arguments:
            rate: calls a second that the worker may make.
            waiting: the number of messages that wait in the worker for their turn. If it is small,
                other workers receive some of the messages, so this worker brings more forward. If
                ``waiting`` is at least 1 and at least ``rate``, the result is 0.
            now: seconds.
        """
        seconds, self._counted_at = min(now - self._counted_at, 10.0), now
        is_behind = waiting >= max(1.0, rate)
        if is_behind:
            self._factor = max(1.0, self._factor / 2)
        else:
            self._factor *= 2 ** (seconds / PULL_DOUBLES_SECONDS)
            self._factor = min(LONGEST_PULL, self._factor)
        pace = rate * self._factor
        self._owed = min(max(1.0, pace / 2), self._owed + seconds * pace)
        return 0 if is_behind else int(self._owed)

    def took(self, number: int) -> None:
        self._owed -= number


def spread_returns(
    hidden: Hidden[Any], now: float, rng: RandomSource, *, is_down: bool
) -> list[tuple[Any, int]]:
    """Return hidden messages that SQS should show soon, because their worker stops.

    No other worker can bring these messages forward. Each message comes with the seconds after
    which SQS should show it. While the provider is down, a message stays hidden if its next
    receive is its last. At this receive, it would run in spite of the outage, and fail for good.
    """
    movable = [each for each in hidden.all() if not (is_down and each[2].next_is_last)]
    spread = min(len(movable) / RETURNS_PER_SECOND, LONGEST_SPREAD_SECONDS)
    found = (
        (message, until, math.ceil(max(rng.uniform(0, spread), recall.not_before - now)))
        for message, until, recall in movable
    )
    return [
        (message, seconds)
        for message, until, seconds in found
        if now + seconds + LEAST_GAIN_SECONDS < until
    ]
