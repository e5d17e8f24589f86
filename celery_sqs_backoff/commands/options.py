"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from celery.bin.base import COMMA_SEPARATED_LIST, CeleryOption

from celery_sqs_backoff.redrive.options import OUTCOMES

F = TypeVar("F", bound=Callable[..., Any])


def option(group: str, *names: str, **settings: Any) -> Callable[[F], F]:
    """A click option in a section of the help."""
    return click.option(*names, cls=CeleryOption, help_group=group, **settings)


#: Which queues a worker consumes is known to its command line alone, without ``task_queues``.
queues_option = option(
    "What to look at",
    *("-Q", "--queues"),
    type=COMMA_SEPARATED_LIST,
    metavar="QUEUES",
    help="Comma-separated queues, as for the worker. Default: task_queues or the default queue.",
)


def select_queues(app: Any, names: Sequence[str] | None) -> None:
    """Look at the queues that ``-Q`` names, as a worker consumes them; ``None``: the app's own.

    Raises:
        click.BadParameter: the app has no such queue, and does not create missing ones.
    """
    try:
        app.amqp.queues.select(names)
    except KeyError as exc:
        raise click.BadParameter(
            f"{exc.args[0]!r} is not in task_queues, and task_create_missing_queues is off",
            param_hint="--queues",
        ) from None


_SELECTION: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--task", {"metavar": "GLOB", "help": "Only this task."}),
    ("--reason", {"metavar": "GLOB", "help": "Only this reason on their record."}),
    (
        "--outcome",
        {
            "type": click.Choice(OUTCOMES, case_sensitive=False),
            "metavar": "OUTCOME",
            "help": f"Only {', '.join(OUTCOMES)}.",
        },
    ),
    ("--error", {"metavar": "GLOB", "help": "Only this error, as 'type: message'."}),
    ("--from", {"metavar": "QUEUE", "help": "Only from this queue: a name, URL or ARN."}),
    ("--older", {"metavar": "DURATION", "help": "Only first sent longer ago: 36h, 2d."}),
    ("--newer", {"metavar": "DURATION", "help": "Only first sent since."}),
    (
        "--id",
        {
            "multiple": True,
            "metavar": "ID",
            "help": "Only this message or task ID; repeatable.",
        },
    ),
    (
        "--ids",
        {
            "metavar": "FILE",
            "type": click.Path(exists=True, dir_okay=False, path_type=Path),
            "help": "Only the IDs in this file, one per line.",
        },
    ),
)


def selection_options(command: F) -> F:
    """Add the options that say which messages are meant."""
    for name, settings in reversed(_SELECTION):
        names = (name, "origin") if name == "--from" else (name,)
        command = option("Which messages", *names, **settings)(command)
    return command


def ids_of(single: Sequence[str], file: Path | None) -> list[str] | None:
    """The ids given one by one, and those of a file; ``None``: neither is given."""
    if file is None:
        return [*single] or None
    try:
        return [*single, *file.read_text(encoding="utf-8-sig").split()]
    except (OSError, UnicodeDecodeError) as exc:
        why = getattr(exc, "strerror", None) or "it is not UTF-8 text"
        raise ValueError(f"cannot read ids from {file}: {why}") from None


def has_selection(options: Mapping[str, Any]) -> bool:
    """Whether some messages are meant, and not all."""
    names = ("task", "reason", "outcome", "origin", "error", "older", "newer", "ids")
    return any(options.get(name) for name in names)
