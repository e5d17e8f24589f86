"""What the results of a call make of its rows."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ...retry.policies import EqualJitter, FullJitter
from ..errors import Failure
from .book import HIDING, Book, Call, Entry, Happening
from .rows import TRANSITIONS, Meaning, Purpose, Row, Step, Want, meaning_of

#: Between tries of what may work again without anybody changing anything.
_TRANSIENT = FullJitter(base=0.2, cap=10)

#: Of a visibility timeout: the most that settlements wait after a transient failure; and the
#: seconds that they may wait all the same, as long as four tries fit into the timeout.
_PAUSE_SHARE = 0.1
_SHORT_PAUSE_SECONDS = 1.0
_SHORT_PAUSE_SHARE = 1 / 8

#: Between tries of what a person has to put right.
_REFUSED = EqualJitter(base=4, cap=60)

#: Of a visibility timeout: the most between the first tries of a change that is refused.
_REFUSED_SHARE = 1 / 6

#: Between tries of a dead letter that cannot be sent.
_UNSENT = EqualJitter(base=1, cap=300)

#: A renewal that fails for one message only has no more tries to lose than fit before its end.
_RENEWAL_TRIES = 3

#: Bodies of dead letters that wait in memory for a queue that refuses them. Beyond that the message
#: is hidden, and its body is taken from its next receive.
_MAX_LETTER_BYTES = 32 * 1_048_576
_SET_ASIDE_SECONDS = 300

_CONFIRMED = {
    Purpose.HIDE: Happening.HIDDEN,
    Purpose.GIVE_BACK: Happening.GIVEN_BACK,
    Purpose.DELETE: Happening.DELETED,
}

#: About one entry. If the whole call fails so, one of the entries is why.
_OF_ONE_ENTRY = (Meaning.VOID, Meaning.TOO_LONG, Meaning.UNFIT)


class Answers:
    """Enters results into a book.

    Arguments:
        book: the rows.
        rng: for the jitter between tries.
    """

    def __init__(self, book: Book, rng: random.Random) -> None:
        self._book = book
        self._rng = rng

    def enter(self, call: Call, results: Sequence[Failure | None], now: float) -> None:
        """Enter one result per entry. A call that sends may have been divided, by its bytes."""
        lane, first = call.lane, call.entries[0]
        failure = next(filter(_is_of_lane, results), None)
        if failure is not None:
            meaning = meaning_of(failure)
            # Three calls that were throttled do not make the refusal after them the fourth.
            lane.failures = lane.failures + 1 if meaning is lane.meaning else 1
            lane.meaning = meaning
            pause = self._pause(lane.failures, meaning, first.row, first.purpose)
            lane.not_before = now + pause
        elif None in results:
            lane.failures, lane.meaning, lane.not_before = 0, Meaning.DONE, 0.0
        for entry, result in zip(call.entries, results, strict=True):
            if _is_of_a_neighbour(result, results):
                self._try_alone(entry, now)
            elif self._book.is_current(entry.row):
                self._enter_one(entry, result, call.asked_at, now)
            else:
                self._assert_newer_row(entry, now)

    def _try_alone(self, entry: Entry, now: float) -> None:
        entry.row.goes_alone = True
        if self._book.is_current(entry.row):
            self._book.plan_again(entry, now, now)

    def _assert_newer_row(self, entry: Entry, now: float) -> None:
        """A change that was meant for an earlier receive may have ended the newer one's hold."""
        newer = self._book.rows.get(entry.row.key)
        is_removal = entry.purpose in (Purpose.DELETE, Purpose.SEND)
        if newer is not None and not is_removal and not newer.is_hiding:
            newer.renew_at = now
            self._book.plan_visibility(newer, now, now)

    def _enter_one(
        self, entry: Entry, failure: Failure | None, asked_at: float, now: float
    ) -> None:
        row, purpose, book = entry.row, entry.purpose, self._book
        step = TRANSITIONS[purpose][meaning_of(failure)]
        if purpose is not Purpose.SEND and row.handle != entry.handle:
            book.plan_again(entry, now, now, renew_at=now)  # about an older receive: assert ours
        elif step is Step.EXTEND:
            self._extend(entry, asked_at, now)
        elif step is Step.FINISH:
            book.finish(row, _CONFIRMED[purpose], purpose)
        elif step is Step.SENT:
            row.is_sent, row.failures, row.park = True, 0, None
            book.drop_content(row)
            book.tell(Happening.SENT, row, purpose)
            book.plan_removal(row, now, now)
        elif step in (Step.LOSE, Step.DROP) and row.is_surely_deleted(now):
            book.finish(row, Happening.DELETED, Purpose.DELETE)
        elif step is Step.LOSE:
            self._lose(row, failure, now)
        elif step is Step.DROP:
            book.finish(row, Happening.TOO_LATE, purpose, failure)
        elif step is Step.SHORTEN and (entry.seconds > 1 or purpose is Purpose.RENEW):
            row.longest_seconds = entry.seconds // 2
            book.plan_again(entry, now, now, renew_at=now)
        elif step is Step.PLAIN and not row.without_record:
            row.without_record = True
            book.plan_again(entry, now, now)
        else:
            self._try_again(entry, step, failure, now)

    def _extend(self, entry: Entry, asked_at: float, now: float) -> None:
        row = entry.row
        if asked_at >= row.visible_at:
            self._book.miss(row)
        row.extend(asked_at, entry.seconds)
        self._book.plan_expiry(row, now)
        self._book.tell(Happening.RENEWED, row, Purpose.RENEW)
        if row.want is Want.HELD:
            row.failures = 0
        if not row.is_hiding:
            self._book.plan_visibility(row, now, now)

    def _lose(self, row: Row, failure: Failure | None, now: float) -> None:
        # Perhaps SQS has just deleted it for us, and the response is on its way.
        crosses_delete = row.is_being_deleted and not row.may_be_visible(now)
        if row.become(Want.LOST, may_be_lost=True):
            self._book.tell(Happening.LOST, row, Purpose.RENEW, failure)
        elif row.is_settled and not row.is_hiding and not crosses_delete:
            self._book.finish(row, Happening.TOO_LATE, Purpose.RENEW, failure)

    def _try_again(self, entry: Entry, step: Step, failure: Failure | None, now: float) -> None:
        row, purpose = entry.row, entry.purpose
        is_refused = step in (Step.REFUSE, Step.PLAIN)
        if is_refused:
            self._book.tell(Happening.REFUSED, row, purpose, failure)
        self._book.tell(Happening.RETRIED, row, purpose, failure)
        if step is Step.DOUBT:
            row.in_doubt = True
        if purpose is Purpose.RENEW:
            self._renew_again(entry, failure, now)
            return
        row.failures += 1
        if purpose is Purpose.SEND and row.is_parked and is_refused:
            # It has not failed, its queue was full: it is hidden after all.
            row.want, row.is_parked = Want.HIDE, False
            self._book.plan_visibility(row, now, now)
        elif purpose is Purpose.SEND and self._book.letter_bytes > _MAX_LETTER_BYTES:
            row.want, row.due_at = Want.HIDE, now + _SET_ASIDE_SECONDS
            self._book.drop_content(row)
            self._book.plan_visibility(row, now, now)
        else:
            at = now + self._row_pause(row.failures, entry, failure)
            if purpose in HIDING.values():
                # Later it would end the hold of whoever has the message then.
                at = max(now, min(at, row.visible_at))
            self._book.plan_again(entry, at, now)

    def _renew_again(self, entry: Entry, failure: Failure | None, now: float) -> None:
        row = entry.row
        if now >= row.visible_at:
            self._book.miss(row)
        if row.want is Want.HELD:
            row.failures += 1
        pause = self._row_pause(max(row.failures, _RENEWAL_TRIES), entry, failure)
        self._book.plan_again(entry, now, now, renew_at=now + pause)

    def _row_pause(self, tries: int, entry: Entry, failure: Failure | None) -> float:
        if _is_of_lane(failure):
            return 0.0  # the lane waits
        return self._pause(tries, meaning_of(failure), entry.row, entry.purpose)

    def _pause(self, tries: int, meaning: Meaning, row: Row, purpose: Purpose) -> float:
        """How long to wait before another try, in seconds.

        After a transient failure, no more than a tenth of the visibility timeout: what is settled
        next waits, too, and must not be received again because of an outage that is over.
        """
        if purpose is Purpose.SEND:
            return _UNSENT.delay(tries, self._rng)
        if meaning in (Meaning.REFUSED, Meaning.UNFIT):
            pause = _REFUSED.delay(tries, self._rng)
            if purpose is not Purpose.DELETE and tries <= _RENEWAL_TRIES:
                # Refused once may be a mistake, and the renewals of the queue wait in the same
                # lane: no hold must end before it is asked for again.
                pause = min(pause, row.queue.visibility_timeout_seconds * _REFUSED_SHARE)
            return pause
        timeout = row.queue.visibility_timeout_seconds
        short = min(_SHORT_PAUSE_SECONDS, timeout * _SHORT_PAUSE_SHARE)
        most = max(short, timeout * _PAUSE_SHARE)
        return min(most, _TRANSIENT.delay(tries, self._rng))


def _is_of_lane(failure: Failure | None) -> bool:
    """Whether the call failed for a reason that none of its entries is."""
    return failure is not None and failure.is_of_call and meaning_of(failure) not in _OF_ONE_ENTRY


def _is_of_a_neighbour(failure: Failure | None, results: Sequence[Failure | None]) -> bool:
    """Whether a whole call failed because of one of its entries, and nobody knows which."""
    is_of_one = failure is not None and failure.is_of_call and not _is_of_lane(failure)
    return is_of_one and results.count(failure) > 1
