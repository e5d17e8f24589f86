"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from celery.bin.base import COMMA_SEPARATED_LIST, CeleryOption

from celery_sqs_backoff.redrive.options import OUTCOMES

F = TypeVar("F", bound=Callable[..., Any])

#: Type of an option for a file that may be missing.
FILE = click.Path(dir_okay=False, path_type=Path)
#: Type of an option for a file that must exist.
READABLE_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def option(group: str, *names: str, **settings: Any) -> Callable[[F], F]:
    """Declare an option in a section of the help.

    Arguments:
        group: title of the section.
        names: spellings of the option, such as ``"--rate RATE"``. The word after the space is the
            value's name in the help. A name without dashes is the name of the parameter.
        settings: as for ``click.option``. An option without a value's name and without a type is a
            flag.
    """
    spellings = [name.partition(" ")[0] for name in names]
    value = next((name.partition(" ")[2] for name in names if " " in name), None)
    settings = {"metavar": value, **settings}
    if settings["metavar"] is None and "type" not in settings:
        settings["is_flag"] = True
    if "default" in settings:
        settings["show_default"] = True
    return click.option(*spellings, cls=CeleryOption, help_group=group, **settings)


#: The user must repeat a worker's ``-Q`` here. Without the setting ``task_queues``, only the
#: command line of the worker says which queues it consumes.
queues_option = option(
    "What to look at",
    *("-Q", "--queues QUEUES"),
    type=COMMA_SEPARATED_LIST,
    help="Comma-separated queues, as for a worker. [default: task_queues or the default queue]",
)


def select_queues(app: Any, names: Sequence[str] | None) -> None:
    """Select the queues that ``-Q`` names, as a worker does. ``None`` selects the app's queues.

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


def _which(*names: str, **settings: Any) -> Callable[[F], F]:
    return option("Which messages", *names, **settings)


_SELECTION: Sequence[Callable[[Any], Any]] = (
    _which("--task GLOB", help="Only this task."),
    _which("--reason GLOB", help="Only this reason in the dead-letter record."),
    _which(
        "--outcome OUTCOME",
        type=click.Choice(OUTCOMES, case_sensitive=False),
        help=f"Only {', '.join(OUTCOMES)}.",
    ),
    _which("--error GLOB", help="Only this error, a glob for 'type: message'."),
    _which("--from QUEUE", "origin", help="Only from this queue: a name, URL or ARN."),
    _which("--older DURATION", help="Only if first sent longer ago than this (36h)."),
    _which("--newer DURATION", help="Only if first sent more recently (1h)."),
    _which("--id ID", multiple=True, help="Only this message or task ID; repeatable."),
    _which("--ids FILE", type=READABLE_FILE, help="Only the IDs in this file, one per line."),
)


def selection_options(command: F) -> F:
    """Add the options that select messages."""
    for each in reversed(_SELECTION):
        command = each(command)
    return command


def ids_of(single: Sequence[str], file: Path | None) -> list[str] | None:
    """Return the IDs of ``--id`` and of the file in ``--ids``. ``None`` = no IDs were given.

    Raises:
        ValueError: the file cannot be read.
    """
    if file is None:
        return [*single] or None
    try:
        return [*single, *file.read_text(encoding="utf-8-sig").split()]
    except (OSError, UnicodeDecodeError) as exc:
        why = getattr(exc, "strerror", None) or "it is not UTF-8 text"
        raise ValueError(f"cannot read ids from {file}: {why}") from None
