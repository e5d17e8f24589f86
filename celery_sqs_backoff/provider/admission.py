"""How many calls a second does a provider get that has just come back?

One rate per worker (AIMD) admits all of a provider's messages while it recovers: those that are
recalled, those that return by themselves and new ones. Each takes a token; tokens come at the rate,
and are kept for ``SAVED_SECONDS`` at most: many providers count the calls of each second. Pure: the
time is passed in.

* Start: ``START_RATE`` calls a second. Each success adds to it, so that it doubles in
  ``DOUBLING_SECONDS`` until the provider refuses for the first time.
* A refusal (a RETRYABLE failure) cuts the rate to ``KEPT_AFTER_REFUSAL`` of it. That is CUBIC's
  share (RFC 9438, section 4.6), not a half: an overload refuses calls of many workers at once, and
  if all of them halve together, half of the provider's capacity is idle for a while. Only the first
  refusal cuts twice: by doubling, the rate has gone far beyond what the provider takes. Refusals
  of calls that began less than ``SETTLE_SECONDS`` after the last cut say nothing new and do not
  cut again: a provider that counts the calls of each second refuses the rest of it, at any rate.
* From then on the rate follows CUBIC's curve (section 4.2) through the rate that was refused: back
  to it within ``REGAIN_SECONDS``, slowly near it, faster beyond. A rate that was refused is thus
  tried again about once in that time. But each success adds ``GROWN_BY_SUCCESS`` of the rate, and
  at most ``MOST_BY_SUCCESS``: else a provider that goes on to fail one call in twenty, whatever the
  rate, would be called ever more seldom.
* A rate that nobody uses does not grow, and no success adds more than one does at the start: a
  message that one worker brings forward may run in another, whose rate has been idle for long.

Messages are brought forward at the same rate, unless many wait here already. They take their tokens
where they run: one worker may have hidden most of what all of them run.
"""

from __future__ import annotations

import math

__all__ = ["Admission"]

START_RATE = 2.0
LOWEST_RATE = 0.2
DOUBLING_SECONDS = 0.5
REGAIN_SECONDS = 12.0
KEPT_AFTER_REFUSAL = 0.7

SETTLE_SECONDS = 0.5

#: The curve's rise in the ``REGAIN_SECONDS`` after the refused rate, as a share of that rate.
BEYOND = 0.5

GROWN_BY_SUCCESS, MOST_BY_SUCCESS = 0.02, 0.2

#: Tokens that nobody takes are kept for this long.
SAVED_SECONDS = 0.5

#: The recovery is over after so long without a refusal and without anybody having to wait.
CALM_SECONDS = 60.0


class Admission:
    """The rate of one recovering provider in one worker. Not safe for threads by itself.

    Times are seconds of one clock.
    """

    def __init__(self) -> None:
        self.is_limiting = False
        self.rate = START_RATE
        self._refused_rate: float | None = None
        self._refused_at = -math.inf
        self._tokens = self._recalls = 0.0
        self._filled_at = 0.0
        self._calm_since = 0.0

    def start(self, now: float) -> None:
        """Begin to limit: the provider has answered a probe."""
        self.is_limiting = True
        self.rate = START_RATE
        self._refused_rate = None
        # Calls under way had no such rate; and a provider may refuse the rest of the second.
        self._refused_at = now + SETTLE_SECONDS
        self._tokens = self._recalls = 1.0
        self._filled_at = self._calm_since = now

    def stop(self) -> None:
        """Stop limiting: the provider is down again, and the gate decides."""
        self.is_limiting = False

    def admit(self, most: int, now: float) -> int:
        """Take tokens for up to ``most`` messages; return how many there were."""
        if not self.is_limiting or most <= 0:
            return 0
        self._fill(now)
        admitted = min(most, math.floor(self._tokens))
        self._tokens -= admitted
        if admitted < most:
            self._calm_since = now
        return admitted

    def recall(self, most: int, now: float) -> int:
        """Return how many of up to ``most`` messages may be brought forward now, at the same rate.

        They take their tokens where they run, which may be in another worker.
        """
        if not self.is_limiting or most <= 0:
            return 0
        self._fill(now)
        self._calm_since = now
        recalled = min(most, math.floor(self._recalls))
        self._recalls -= recalled
        return recalled

    def is_behind(self, waiting: int) -> bool:
        """Return whether more messages wait for their turns than the next moment brings tokens."""
        return waiting > SAVED_SECONDS * self.rate

    def seconds_to_turn(self, ahead: int, now: float) -> float:
        """Return the seconds until a message has a token, if ``ahead`` others come before it."""
        self._fill(now)
        return max(0.0, (ahead + 1 - self._tokens) / self.rate)

    def succeeded(self, now: float) -> None:
        """Note that a call succeeded: the rate may grow."""
        if not self.is_limiting:
            return
        self._fill(now)
        if self._tokens >= self._most:  # the bucket is full: this rate is not what limits the calls
            return
        grown = self.rate + math.log(2) / DOUBLING_SECONDS
        if self._refused_rate is not None:
            x = (now - self._refused_at) / REGAIN_SECONDS - 1
            steepness = 1 - KEPT_AFTER_REFUSAL if x < 0 else BEYOND
            curve = self._refused_rate * (1 + steepness * x**3)
            least = self.rate + min(GROWN_BY_SUCCESS * self.rate, MOST_BY_SUCCESS)
            grown = min(grown, max(curve, least))
        self.rate = max(self.rate, grown)

    def refused(self, began: float, now: float) -> None:
        """Note a RETRYABLE failure of a call that began at ``began``: the rate is cut."""
        if not self.is_limiting:
            return
        self._calm_since = now
        if began <= self._refused_at + SETTLE_SECONDS:
            return
        self._fill(now)
        if self._refused_rate is None:  # doubling has gone too far
            self.rate *= KEPT_AFTER_REFUSAL
        self._refused_rate = self.rate
        self._refused_at = now
        self.rate = max(LOWEST_RATE, KEPT_AFTER_REFUSAL * self.rate)

    def is_calm(self, now: float) -> bool:
        """Return whether nobody was refused and nobody had to wait for ``CALM_SECONDS``."""
        return self.is_limiting and now - self._calm_since >= CALM_SECONDS

    def _fill(self, now: float) -> None:
        elapsed = max(0.0, now - self._filled_at)
        self._filled_at = max(now, self._filled_at)
        self._tokens = min(self._most, self._tokens + elapsed * self.rate)
        self._recalls = min(self._most, self._recalls + elapsed * self.rate)

    @property
    def _most(self) -> float:
        """Tokens that the bucket holds: one at least, or a low rate would allow no call."""
        return max(1.0, SAVED_SECONDS * self.rate)
