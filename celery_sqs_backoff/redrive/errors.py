"""Errors of a redrive that could not begin, or could not go on.

RedriveError
+-- RedriveRefused      the redrive is impossible or would do harm. No message was sent
+-- RedriveUnreachable  SQS does not answer, or denies a call
"""

from __future__ import annotations

from ..sqs.errors import Failure, advice


class RedriveError(Exception):
    """Base class of the errors of a redrive."""


class RedriveRefused(RedriveError):
    """The redrive did not begin. The error's text gives the reason and a remedy.

    Attributes:
        overridable: whether ``force=True`` lets the redrive run in spite of the error.
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
    """Return a text that says why a call failed and what to do about the failure.

    ``what`` names the call, such as ``"ReceiveMessage"``.
    """
    return f"{what}: {failure.code}. {advice(failure.code)}"


def make_unreachable(what: str, failure: Failure) -> RedriveUnreachable:
    """Return the error to raise for a failed call. ``what`` is as in :func:`explain`."""
    return RedriveUnreachable(explain(what, failure), failure.code)
