"""Decides whether a message's budgets allow another retry.

The budgets are limits of the task (``max_retries``, ``retry_for``, ``crash_budget``) and of the
queue (``maxReceiveCount``, retention period). This module takes plain numbers only, which
``sqs.delivery`` reads from a message.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from operator import methodcaller
from random import Random

from .options import Options
from .policies import FullJitter, Policy, RandomSource, to_seconds

logger = logging.getLogger(__name__)

#: While a provider is down, its messages are hidden without a run. Each message gets a last run
#: shortly before its ``retry_for`` ends: a minute before the end, or a tenth of ``retry_for`` if
#: that is shorter. The reason is that SQS shows a message a little late, and that the worker may be
#: busy.
LAST_RUN_SECONDS, LAST_RUN_SHARE = 60.0, 0.1


class GiveUpReason(str, Enum):
    """Why a message is given up (not retried any more). The value is in the dead-letter record."""

    NOT_RETRYABLE = "not retryable"
    MAX_RETRIES = "max_retries reached"
    RETRY_FOR = "retry_for is over"
    DELAY_TOO_LONG = "the delay is longer than retry_for"
    MAX_RECEIVE_COUNT = "the queue's maxReceiveCount is reached"
    RETENTION = "the queue's retention period is nearly over"
    NEVER_DUE = "its ETA is after the end of the queue's retention period"
    WORKER_LOST = "worker lost"
    TIME_LIMIT = "hard time limit"
    ABORTED = "the run was aborted"
    NOT_HANDED_ON = "the rest of its workflow could not be sent"
    REJECTED = "rejected by the task"
    PARKED = "parked"
    NOT_UNDERSTOOD = "not understood"


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """How much of its budgets a message has used so far."""

    #: The message had at most this many runs before the current run. The number comes from its
    #: receives, and not every receive leads to a run.
    retries: int = 0
    #: Seconds since SQS first delivered the message at or after its ETA.
    elapsed: float = 0.0
    #: The queue's ``maxReceiveCount`` allows no further receive. At the next receive, SQS would
    #: move the message to the dead-letter queue, without a reason on it.
    is_last_receive: bool = False
    #: SQS has delivered the message more often than the queue's ``maxReceiveCount`` allows.
    is_overdue: bool = False
    #: SQS is about to delete the message, because the queue's retention period is nearly over.
    is_expiring: bool = False


def find_reason(
    standing: Standing, *, max_retries: int | None, retry_for: float | None, delay: float
) -> GiveUpReason | None:
    """Return which budget allows no further retry, or ``None`` if all budgets allow it.

    Arguments:
        standing: the message's use of its budgets when its run has just failed.
        max_retries: highest number of retries; ``None`` = no limit.
        retry_for: seconds of ``standing.elapsed`` after which no retry may begin; ``None`` = no
            limit. If the next retry would begin later, the message is given up now.
        delay: seconds until the retry would begin.
    """
    if max_retries is not None and standing.retries >= max_retries:
        return GiveUpReason.MAX_RETRIES
    if retry_for is not None and standing.elapsed + delay >= retry_for:
        fits = standing.elapsed >= retry_for or delay < retry_for
        return GiveUpReason.RETRY_FOR if fits else GiveUpReason.DELAY_TOO_LONG
    if standing.is_last_receive:
        return GiveUpReason.MAX_RECEIVE_COUNT
    if standing.is_expiring:
        return GiveUpReason.RETENTION
    return None


def find_reason_before_run(
    standing: Standing,
    *,
    max_retries: int | None,
    retry_for: float | None,
    crashes: int,
    crash_budget: int,
) -> GiveUpReason | None:
    """Return which budget was used up before this receive, or ``None`` if the task may start.

    Not every receive leads to a run. For example, a worker that stops gives messages back without a
    run. So a message that has perhaps never run gets a run, even after ``retry_for`` or with too
    many receives. A known crash shows that the message has run. In the check of ``retry_for``, the
    message also counts as run if ``standing.retries`` is at least ``crash_budget``.

    Arguments:
        standing: the message's use of its budgets when the worker has just received it.
        max_retries, retry_for: as for :func:`find_reason`.
        crashes: number of runs that are known to have crashed, for example because their process
            was killed.
        crash_budget: the number of crashes at which the message is given up.
    """
    if crashes >= crash_budget:
        return GiveUpReason.WORKER_LOST
    if max_retries is not None and crashes > max_retries:
        return GiveUpReason.MAX_RETRIES
    has_run = crashes > 0 or standing.retries >= crash_budget
    if retry_for is not None and has_run and standing.elapsed >= retry_for:
        return GiveUpReason.RETRY_FOR
    if crashes > 0 and standing.is_overdue:
        return GiveUpReason.MAX_RECEIVE_COUNT
    return None


def longest_hold(standing: Standing, *, retry_for: float | None) -> float:
    """Return the longest time in seconds for which a message may wait for its provider.

    0 or less means that the message must run now, even if the provider seems to be down, because
    SQS is about to delete the message, or ``retry_for`` is nearly over.
    """
    if standing.is_expiring:
        return 0.0
    if retry_for is None:
        return math.inf
    last_run = min(LAST_RUN_SECONDS, LAST_RUN_SHARE * retry_for)
    return retry_for - last_run - standing.elapsed


def receives_needed(
    backoff: Policy,
    *,
    retry_for: float | None,
    max_retries: int | None,
    at_most: int,
    rng: Random | None = None,
) -> int:
    """Estimate how often SQS delivers a message that always fails, until its budgets are used up.

    Compare the number with a queue's ``maxReceiveCount``. The delays are random, so the real number
    may be a tenth higher or lower.

    Arguments:
        at_most: the highest result. SQS allows no ``maxReceiveCount`` above 1,000.
        rng: the source of random delays; ``None`` = the same delays at each call.
    """
    rng, backoff = rng or Random(0), tolerant(backoff)
    most_failures = at_most - 1 if max_retries is None else min(max_retries, at_most - 1)
    most_seconds = math.inf if retry_for is None else retry_for
    elapsed, failures = 0.0, 0
    while failures < most_failures and elapsed < most_seconds:
        failures += 1
        elapsed += max(1.0, backoff.delay(failures, rng))
    return failures + 1


def shrink(delay: float, ceiling: float, cap: float) -> float:
    """Scale a delay from the range 0 to ``ceiling`` down to the range 0 to ``cap``.

    If ``ceiling`` is not above ``cap``, the delay does not change. The function does not cut delays
    at the cap, because then many messages would wait exactly ``cap`` seconds and come back
    together.
    """
    return delay if ceiling <= cap else delay * cap / ceiling


@dataclass(frozen=True)
class _Tolerant(Policy):
    """Wraps a user's policy, so that it never raises and no delay exceeds ``cap`` seconds."""

    policy: Policy
    cap: float
    is_logged: bool

    def ceiling(self, attempt: int) -> float:
        return self.ask(attempt, methodcaller("ceiling", attempt))

    def delay(self, attempt: int, rng: RandomSource = random) -> float:
        return self.ask(attempt, methodcaller("delay", attempt, rng))

    def delay_for(self, message_id: str, attempt: int, rng: RandomSource = random) -> float:
        return self.ask(attempt, methodcaller("delay_for", message_id, attempt, rng))

    def ask(self, attempt: int, question: Callable[[Policy], float]) -> float:
        try:
            seconds = to_seconds("delay", question(self.policy))
            if self.cap == math.inf:
                return seconds
            return shrink(seconds, to_seconds("ceiling", self.policy.ceiling(attempt)), self.cap)
        except Exception as exc:  # noqa: BLE001  # a bug of the policy must not lose the message
            if self.is_logged:
                logger.error(
                    "sqs_backoff.backoff_broken: %s fails for attempt %d (%s); using FullJitter()"
                    " instead",
                    *(type(self.policy).__qualname__, attempt, type(exc).__name__),
                )
        return replace(self, policy=FullJitter()).ask(attempt, question)


def tolerant(policy: Policy, *, cap: float = math.inf) -> Policy:
    """Wrap a policy so that it never raises. If it fails, ``FullJitter()`` gives the delay.

    Arguments:
        cap: the longest delay in seconds, such as a task's ``fifo_cap`` on a FIFO queue. Delays are
            scaled down as by :func:`shrink`.
    """
    return _Tolerant(policy, cap, is_logged=False)


def draw_delay(
    options: Options, *, message_id: str, attempt: int, is_fifo: bool, rng: RandomSource
) -> float:
    """Draw the delay in seconds after failure number ``attempt`` (1 = the first).

    The policy must return 0 or more seconds. If it raises or returns another value, this function
    logs ``sqs_backoff.backoff_broken`` and draws the delay from ``FullJitter()``.

    Arguments:
        options: the task's options, with ``backoff`` and ``fifo_cap``.
        is_fifo: the message is on a FIFO queue, where ``fifo_cap`` applies.
    """
    cap = options.fifo_cap if is_fifo else math.inf
    policy = _Tolerant(options.backoff, cap, is_logged=True)
    return policy.ask(attempt, methodcaller("delay_for", message_id, attempt, rng))
