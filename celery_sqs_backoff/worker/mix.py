"""Does a queue bring the messages of one provider only?

Asked where a provider that is down, or busy, may hold up a whole queue. The answer is yes only if
the app routes no other task to the queue, and no other message has come from it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

__all__ = ["QueueMix"]

#: Fewer messages say nothing.
LEAST_SEEN = 10


class QueueMix:
    """What each queue brings. Safe in any thread.

    Arguments:
        routed: from a queue's name in Celery to the providers of the tasks that the app routes to
            it; ``None`` among them stands for a task without one.
    """

    def __init__(self, routed: Callable[[str], Iterable[str | None]] = lambda name: ()) -> None:
        self._routed = routed
        self._lock = threading.Lock()
        self._seen: dict[str, dict[str | None, int]] = {}

    def note(self, url: str, name: str, provider: str | None) -> None:
        """Note a message of a queue, by its provider; ``None`` = its task has none."""
        with self._lock:
            seen = self._seen.get(url)
            if seen is None:
                routed = dict.fromkeys(self._routed(name), 0)
                seen = self._seen[url] = routed or {None: 0}
            seen[provider] = seen.get(provider, 0) + 1

    def only(self, url: str) -> str | None:
        """Return the one provider whose messages a queue brings; ``None`` = it is mixed."""
        with self._lock:
            seen = self._seen.get(url, {})
            if len(seen) != 1:
                return None
            ((provider, messages),) = seen.items()
            return provider if messages >= LEAST_SEEN else None
