"""The arguments of a message, of which a run may change lists and dicts in place."""

from __future__ import annotations

import pickle
from copy import deepcopy
from typing import Any


def imprint(args: Any, kwargs: Any) -> int | None:
    """Return a number that is another one when the arguments have changed.

    ``None``: they cannot be pickled, so nobody knows. (Of the same objects, a pickle is the same.)
    """
    try:
        return hash(pickle.dumps((args, kwargs), pickle.HIGHEST_PROTOCOL))
    except Exception:  # noqa: BLE001  # objects of the user's, which may do anything
        return None


def as_they_are(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return arguments that no longer change: a ``finally`` of the task's may empty its lists."""
    try:
        return deepcopy((args, kwargs))
    except Exception:  # noqa: BLE001  # objects of the user's, which may do anything
        return args, kwargs
