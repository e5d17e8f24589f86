"""From which queue, and back to which?"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..queues import Queue
from .broker import Broker, Endpoint
from .errors import RedriveRefused
from .letter import Letter

__all__ = ["Route", "find_route"]


@dataclass
class Route:
    """The dead-letter queue, and where its messages go.

    ``default``: for a message that does not itself say where it came from. ``fixed``: ``to`` was
    given, whatever the messages say. ``ambiguous``: the queues that have this dead-letter queue, if
    they are several.
    """

    source: Endpoint
    queue: Queue
    default: Endpoint | None
    fixed: bool = False
    ambiguous: tuple[str, ...] = ()
    _known: dict[str, Endpoint] = field(default_factory=dict)

    @property
    def unknown(self) -> str:
        """Why a letter has no destination, and what to do."""
        if self.ambiguous:
            return f"it may be from any of {', '.join(self.ambiguous)}: give a destination (to)"
        return "no destination is known: give one (to)"

    def destination(self, letter: Letter) -> Endpoint | None:
        """Where a letter goes; ``None`` if nobody knows.

        In order: ``to``; the queue that SQS moved it from; the origin in the dead-letter record;
        the one queue that has this dead-letter queue.
        """
        if self.fixed:
            return self.default
        origin = letter.source_arn or letter.record.get("origin")
        if not isinstance(origin, str) or not origin:
            return self.default
        if origin not in self._known:
            # SQS wants a dead-letter queue in the account and Region of its sources.
            name = origin.rpartition("/" if "://" in origin else ":")[2]
            same = self.default is not None and self.default.name == name
            self._known[origin] = (
                self.default if same and self.default else self.source.sibling(name)
            )
        found = self._known[origin]
        # Its own queue as destination would be a loop; it can be so after a redrive policy changed.
        return None if found.name == self.source.name else found


def find_route(broker: Broker, source: str, *, to: str | None, force: bool) -> Route:
    """Resolve the queues of a redrive.

    Arguments:
        source: name, URL or ARN of the dead-letter queue, or of a queue that has one.
        to: the destination of all messages, likewise.
        force: also from a dead-letter queue that has one itself.

    Raises:
        RedriveRefused: there is no such queue, or it is not fit.
        RedriveUnreachable: SQS does not answer.
    """
    found = broker.find(source)
    queue = found.read()
    destination = broker.find(to) if to else None
    default, urls = destination, found.sources()
    if queue.dlq_arn is not None and not urls:
        default = destination or found
        found = found.sibling(queue.dlq_arn.rpartition(":")[2])
        queue = found.read()
        urls = []
    if queue.dlq_arn is not None and not force:
        raise RedriveRefused(
            f"Queue {found.name} has a dead-letter queue itself: looking at a message is a receive,"
            f" and after {queue.max_receive_count} of them SQS moves it there. Remove its redrive"
            " policy first, or force it.",
            overridable=True,
        )
    if default is None and len(urls) == 1:
        default = broker.find(urls[0])
    if destination is not None:
        if destination.is_fifo != found.is_fifo:
            raise RedriveRefused(
                f"{found.name} and {destination.name} are not of the same type: FIFO messages go to"
                " a FIFO queue, others to a standard queue."
            )
        if destination.url == found.url:
            raise RedriveRefused(f"Source and destination are the same queue: {found.name}.")
        destination.read()
    return Route(
        found,
        queue,
        default,
        fixed=destination is not None,
        ambiguous=tuple(url.rpartition("/")[2] for url in urls) if len(urls) > 1 else (),
    )
