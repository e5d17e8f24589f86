"""A method that is wrapped is called as it would have been: it may be static, or of the class."""

from __future__ import annotations

from typing import Any


def member_of(task: Any, given: Any) -> Any:
    """Return what a class defines as the task has it: bound, where it is a method.

    Arguments:
        given: as it stands in the class (``inspect.getattr_static``).
    """
    bind = getattr(given, "__get__", None)
    return given if bind is None else bind(task, type(task))
