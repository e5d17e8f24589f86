"""``manage.py`` commands that are ``celery`` commands: the same options, output and exit codes."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

import click
from celery import current_app
from celery.bin.base import CLIContext
from django.core.management.base import (  # type: ignore[import-untyped]
    BaseCommand,
    CommandError,
    CommandParser,
)

__all__ = ["CeleryShell"]


class CeleryShell(BaseCommand):  # type: ignore[misc]  # Django is not typed
    """Runs a click command of ``celery``, on the project's Celery app.

    That app is Celery's current one: the one that the project's ``__init__.py`` imports, as
    Celery's guide for Django has it.

    Raises:
        CommandError: with the command's exit code as ``returncode``, unless that is 0.
    """

    command: click.Command
    requires_system_checks: Sequence[str] = ()  # at night, nothing is to be in the way

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """Leave the options to click."""
        return _Verbatim(prog=f"{prog_name} {subcommand}", called_from_command_line=True)

    def handle(self, *args: str, **options: Any) -> None:
        name = str(self.command.name).replace("-", "_")
        celery = CLIContext(
            app=current_app._get_current_object(), no_color=False, workdir=None, quiet=False
        )
        try:
            with redirect_stdout(self.stdout._out):
                self.command.main(
                    args=list(args),
                    prog_name=f"manage.py {name}",
                    obj=celery,
                    standalone_mode=False,
                )
        except click.ClickException as exc:
            raise CommandError(exc.format_message(), returncode=exc.exit_code) from exc
        except SystemExit as exc:
            if exc.code:
                code = exc.code if isinstance(exc.code, int) else 1
                raise CommandError(f"{name} ended with exit code {code}", returncode=code) from exc


class _Verbatim(CommandParser):  # type: ignore[misc]
    """A parser that parses nothing."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Namespace:
        return Namespace(
            args=[str(argument) for argument in args or ()],
            settings=None,
            pythonpath=None,
            traceback=False,
            no_color=False,
            force_color=False,
            verbosity=1,
        )
