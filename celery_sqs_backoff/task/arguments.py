"""Has a run changed its arguments in place? Its message still holds those that were sent."""

from __future__ import annotations

import pickle
from typing import Any

__all__ = ["imprint"]


def imprint(args: Any, kwargs: Any) -> int | None:
    """Return a number that is another one when the arguments have changed.

    ``None``: they cannot be pickled, so nobody knows. (Of the same objects, a pickle is the same.)
    """
    try:
        return hash(pickle.dumps((args, kwargs), pickle.HIGHEST_PROTOCOL))
    except Exception:  # noqa: BLE001  # objects of the user's, which may do anything
        return None
