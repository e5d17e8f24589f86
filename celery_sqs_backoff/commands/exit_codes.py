"""What the exit code of ``celery sqs-redrive`` tells a script. If several hold, the first does."""

from __future__ import annotations

from typing import Final

from celery_sqs_backoff.redrive import Ended, RedriveReport

#: SQS does not answer, or does not let us. What is left is in the source.
UNREACHABLE: Final = 5

#: Ctrl-C, SIGTERM, SIGHUP, or the question was answered with no.
INTERRUPTED: Final = 130

#: The probe, or messages coming back stopped it.
GATE: Final = 3

#: Wrong options, or the redrive was refused: nothing was sent. (2 is click's own.)
USAGE: Final = 2

#: Some messages could not be sent, could not be deleted, or are held in doubt.
SOME_FAILED: Final = 1

#: Messages are left that this run could not receive: run it again.
INCOMPLETE: Final = 6

#: Messages were left because they came back, or were replayed too often.
POISON: Final = 4

#: No message was selected, or none of the selected ones may be sent.
NOTHING_MATCHED: Final = 7

#: All that was asked for.
DONE: Final = 0

_OF_END = {
    Ended.UNREACHABLE: UNREACHABLE,
    Ended.INTERRUPTED: INTERRUPTED,
    Ended.GATE: GATE,
    Ended.FAILED: SOME_FAILED,
    Ended.ERROR: SOME_FAILED,
}


def exit_code(
    report: RedriveReport, *, in_doubt_is_held: bool = False, has_selection: bool = False
) -> int:
    """Return the code for a report.

    Arguments:
        in_doubt_is_held: messages in doubt were left, not sent again.
        has_selection: not all messages were meant.
    """
    if report.ended in _OF_END:
        return _OF_END[report.ended]
    if report.failed or report.not_deleted or (in_doubt_is_held and report.in_doubt):
        return SOME_FAILED
    if report.ended is Ended.INCOMPLETE:
        return INCOMPLETE
    if report.poison:
        return POISON
    done = report.sent + report.dropped + report.deleted
    return NOTHING_MATCHED if has_selection and not done else DONE
