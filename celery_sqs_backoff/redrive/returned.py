"""Behind all the others: what has come back to the source by the time all others are settled?

SQS hands out the messages of a queue in about the order in which they were sent. So what a run
brings back itself is often to be seen only when all that was there before it is gone.
"""

from __future__ import annotations

from .delivery import Delivery
from .errors import RedriveError
from .ledger import Receipt
from .message import DeadLetter
from .queues import Endpoint
from .sweep import MAX_THREADS
from .triage import CAME_BACK, Action, Disposition

__all__ = ["look_for_returned"]


def look_for_returned(delivery: Delivery, *, run_id: str) -> int:
    """Put aside what this run has sent and is here again; return how many messages that are.

    Looks at as many messages as there are by SQS's count beside those that the run has left, once.
    What others have brought meanwhile is given back unsent.
    """
    sweep = delivery.sweep
    source, book = sweep.source, sweep.book
    try:
        total = source.depth().total
    except RedriveError:  # what was done is worth more than this look
        return 0
    with book.lock:
        more = total - book.ledger.hidden - len(book.ledger.undeleted)
    if more <= 0:
        return 0
    returned = 0
    others: list[tuple[str, str]] = []  # ids and receipt handles, not the bodies
    back: Disposition[Endpoint] = Disposition(Action.CAME_BACK, CAME_BACK)

    def handle(found: dict[Receipt, list[DeadLetter]]) -> None:
        nonlocal returned
        delivery.deletes.sent([(m.id, m.handle) for m in found.get(Receipt.SENT_BEFORE, [])])
        new = found.get(Receipt.NEW, [])
        with book.lock:
            returned += book.leave([(m, back) for m in new if m.run_id == run_id])
            others.extend((m.id, m.handle) for m in new if m.run_id != run_id)

    sweep.places += more
    try:
        sweep.run(1 if source.is_fifo else min(MAX_THREADS, -(-more // 10)), handle)
    finally:
        sweep.places -= more
        with book.lock:
            released = [handle for id_, handle in others if book.ledger.release(id_, handle)]
        sweep.give_back(released)
    return returned
