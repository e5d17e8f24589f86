"""Options that ``sqs-redrive`` and ``sqs-peek`` share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from celery.bin.base import CeleryOption

__all__ = ["ids_of", "option", "selection_options"]

F = TypeVar("F", bound=Callable[..., Any])


def option(group: str, *names: str, **settings: Any) -> Callable[[F], F]:
    """A click option in a section of the help."""
    return click.option(*names, cls=CeleryOption, help_group=group, **settings)


_SELECTION: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--task", {"metavar": "GLOB", "help": "Only this task."}),
    ("--reason", {"metavar": "GLOB", "help": "Only letters with this reason on their record."}),
    ("--error", {"metavar": "GLOB", "help": "Only letters with this error ('type: message')."}),
    ("--older", {"metavar": "DURATION", "help": "Only messages first sent longer ago: 36h, 2d."}),
    ("--newer", {"metavar": "DURATION", "help": "Only messages first sent since."}),
    (
        "--id",
        {
            "multiple": True,
            "metavar": "ID",
            "help": "Only this message or task id; can be given several times.",
        },
    ),
    (
        "--ids",
        {
            "type": click.Path(exists=True, dir_okay=False, path_type=Path),
            "help": "Only the message or task ids in this file, one per line.",
        },
    ),
)


def selection_options(command: F) -> F:
    """Add the options that say which messages are meant."""
    for name, settings in reversed(_SELECTION):
        command = option("Which messages", name, **settings)(command)
    return command


def ids_of(single: Sequence[str], file: Path | None) -> list[str] | None:
    """The ids given one by one, and those of a file; ``None``: neither is given."""
    if file is None:
        return [*single] or None
    return [*single, *file.read_text().split()]
