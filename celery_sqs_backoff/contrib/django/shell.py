"""``manage.py`` commands that are ``celery`` commands: the same options, output and exit codes."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

import click
from celery.bin.base import CLIContext
from celery.exceptions import ImproperlyConfigured
from django.core.management.base import (  # type: ignore[import-untyped]
    BaseCommand,
    CommandError,
    CommandParser,
)

from .project import project_app


class CeleryShell(BaseCommand):  # type: ignore[misc]  # Django is not typed
    """Runs a click command of ``celery``, on the project's Celery app.

    That app is the one that the project's ``__init__.py`` imports, as Celery's guide for Django
    has it.

    Raises:
        CommandError: with the command's exit code as ``returncode``, unless that is 0. Without an
            app, with click's for a wrong usage.
    """

    command: click.Command
    requires_system_checks: Sequence[str] = ()  # at night, nothing is to be in the way

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """Leave the options to click."""
        return _Verbatim(
            self.command, prog=f"{prog_name} {subcommand}", called_from_command_line=True
        )

    def handle(self, *args: str, **options: Any) -> None:
        name = str(self.command.name).replace("-", "_")
        try:
            app = project_app()
        except ImproperlyConfigured as exc:
            raise CommandError(str(exc), returncode=click.UsageError.exit_code) from exc
        celery = CLIContext(
            app=app,
            no_color=bool(options.get("no_color")),
            workdir=None,
            quiet=False,
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
    """Parses Django's own options, and leaves all others to click."""

    def __init__(self, command: click.Command, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._command = command
        self._django = ArgumentParser(add_help=False, allow_abbrev=False)
        self._django.add_argument("--settings")
        self._django.add_argument("--pythonpath")
        self._django.add_argument("--traceback", action="store_true")
        self._django.add_argument("--no-color", action="store_true")
        self._django.add_argument("--force-color", action="store_true")
        self._django.add_argument("--skip-checks", action="store_true")
        self._django.add_argument("-v", "--verbosity", type=int, choices=range(4), default=1)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Namespace:
        found, rest = self._django.parse_known_args([str(argument) for argument in args or ()])
        del found.skip_checks
        found.args = rest
        return found

    def format_help(self) -> str:
        """What ``manage.py help`` shows: the help of the click command."""
        with click.Context(self._command, info_name=self.prog) as context:
            return f"{self._command.get_help(context)}\n"
