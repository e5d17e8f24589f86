"""Why a redrive has not begun, or could not go on.

RedriveError
+-- RedriveRefused      it would do harm, or cannot be done: nothing was sent
+-- RedriveUnreachable  SQS does not answer, or does not let us
"""

from __future__ import annotations

from ..sqs.errors import Failure, Kind


class RedriveError(Exception):
    """Base class of what a redrive raises."""


class RedriveRefused(RedriveError):
    """The redrive was not begun: its message says why, and what to do.

    Attributes:
        overridable: whether ``force=True`` lets it run all the same.
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


_WHAT_TO_DO = {
    Kind.DENIED: " Allow the call (docs/iam.md), or check the credentials.",
    Kind.CREDENTIALS: " Renew the credentials.",
    Kind.CREDENTIALS_LATE: " Look at where the credentials come from (STS, for one).",
    Kind.LOCAL: " Nothing was sent: check credentials and Region.",
}


def explain(what: str, failure: Failure) -> str:
    """Say why a call has failed, and what to do about it; ``what`` was being done."""
    return f"{what}: {failure.code}.{_WHAT_TO_DO.get(failure.kind, '')}"


def unreachable(what: str, failure: Failure) -> RedriveUnreachable:
    """Make an error of ours from a failed call."""
    return RedriveUnreachable(explain(what, failure), failure.code)
