"""Settlements that SQS does not confirm hold up the receiving of their queue."""

from __future__ import annotations

from collections.abc import Callable

from celery.utils.log import get_logger

from .reports import queue_name

logger = get_logger(__name__)

#: Settlements of a queue waiting, from which on no more of its messages are asked for.
_BEHIND = 1_000

#: A burst of short tasks is soon over; what lasts longer is said.
_LONG_SECONDS = 10.0


class Backlog:
    """Looks at the settlements that wait, per queue.

    Arguments:
        waiting_for: how many of a queue's settlements SQS has not confirmed, by its URL.
        clock: seconds; it never goes back.
    """

    def __init__(self, waiting_for: Callable[[str], int], clock: Callable[[], float]) -> None:
        self._waiting_for = waiting_for
        self._clock = clock
        self._behind_since: dict[str, float] = {}
        self._said: set[str] = set()

    def is_behind(self, url: str) -> bool:
        """Whether so many wait that the queue should not bring more messages."""
        if (waiting := self._waiting_for(url)) <= _BEHIND:
            self._behind_since.pop(url, None)
            self._said.discard(url)
            return False
        since = self._behind_since.setdefault(url, self._clock())
        if url not in self._said and self._clock() - since >= _LONG_SECONDS:
            self._said.add(url)
            logger.warning(
                "sqs_backoff.settling_behind: queue %s: %d messages are done or retried, and SQS"
                " has not confirmed it; no more are received until it does",
                *(queue_name(url), waiting),
            )
        return True
