"""Why a redrive has not begun, or could not go on.

RedriveError
+-- RedriveRefused      it would do harm, or cannot be done: no message was sent
+-- RedriveUnreachable  SQS does not answer, or does not let us
"""

from __future__ import annotations

from ..sqs.errors import Failure, advice


class RedriveError(Exception):
    """Base class of the errors of a redrive."""


class RedriveRefused(RedriveError):
    """The redrive was not begun. Its message says why, and gives a remedy.

    Attributes:
        overridable: whether ``force=True`` lets it run nevertheless.
    """

    def __init__(self, message: str, *, overridable: bool = False) -> None:
        super().__init__(message)
        self.overridable = overridable


class RedriveUnreachable(RedriveError):
    """SQS could not be reached, or refused a call.

    Attributes:
        code: SQS's error code, or the name of the network error.
    """

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


def explain(what: str, failure: Failure) -> str:
    """Say why a call has failed, and how to fix it. ``what`` names the call."""
    return f"{what}: {failure.code}. {advice(failure.code)}"


def unreachable(what: str, failure: Failure) -> RedriveUnreachable:
    """Make an error of ours from a failed call."""
    return RedriveUnreachable(explain(what, failure), failure.code)
