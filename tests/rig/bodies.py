"""Bodies of tasks that many tests use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def returns(self: Any) -> str:
    return "done"


def raises(exc: BaseException) -> Callable[..., None]:
    """Return a body that raises an exception."""

    def body(self: Any, *args: Any, **kwargs: Any) -> None:
        raise exc.with_traceback(None)

    return body
