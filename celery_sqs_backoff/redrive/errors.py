"""Why a redrive has not begun, or could not go on.

RedriveError
+-- RedriveRefused      it would do harm, or cannot be done: nothing was sent
+-- RedriveUnreachable  SQS does not answer, or does not let us
"""

from __future__ import annotations

from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from ..queues import error_code

__all__ = ["RedriveError", "RedriveRefused", "RedriveUnreachable", "unreachable"]


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

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (str(self), self.overridable))


class RedriveUnreachable(RedriveError):
    """SQS could not be reached, or refused a call.

    Attributes:
        code: SQS's error code, or the name of the network error.
    """

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


def unreachable(what: str, exc: ClientError | BotoCoreError) -> RedriveUnreachable:
    """Make an error of ours from one of botocore's; ``what`` was being done."""
    code = error_code(exc)
    return RedriveUnreachable(f"{what}: {code} ({exc})", code)


def _rebuild(message: str, overridable: bool) -> RedriveRefused:
    return RedriveRefused(message, overridable=overridable)
