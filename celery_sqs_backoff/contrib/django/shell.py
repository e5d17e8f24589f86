"""Run ``celery`` commands from ``manage.py``, with the same options, output and exit codes."""

from __future__ import annotations

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


def manage_command(celery_command: click.Command) -> type[BaseCommand]:
    """Return a ``manage.py`` command that runs a ``celery`` command."""
    attributes = {"help": celery_command.help or "", "command": celery_command}
    return type("Command", (CeleryShell,), {**attributes, "__module__": __name__})


class CeleryShell(BaseCommand):  # type: ignore[misc]  # Django is not typed
    """Run a click command of ``celery``, on the project's Celery app.

    The project's ``__init__.py`` imports that app, as Celery's guide for Django says.

    Raises:
        CommandError: the command ended with an exit code other than 0, or the app is missing (exit
            code 2). The error's ``returncode`` is the exit code.
    """

    command: click.Command
    requires_system_checks = ()  # a failed check must not prevent a redrive during an outage

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """Return a parser for Django's own options. Click parses all other options."""
        kwargs |= {"add_help": False, "allow_abbrev": False}
        parser = super().create_parser(prog_name, subcommand, **kwargs)

        def parse_args(args: Any = None, namespace: Any = None) -> Any:
            found, rest = parser.parse_known_args([str(argument) for argument in args or ()])
            found.args = rest
            return found

        parser.parse_args = parse_args
        return parser

    def print_help(self, prog_name: str, subcommand: str) -> None:
        """Show the help of the click command, for ``manage.py help``."""
        with click.Context(self.command, info_name=f"{prog_name} {subcommand}") as context:
            self.stdout.write(self.command.get_help(context))

    def handle(self, *args: str, no_color: bool = False, **options: Any) -> None:
        name = str(self.command.name).replace("-", "_")
        try:
            app = project_app()
        except ImproperlyConfigured as exc:
            raise CommandError(str(exc), returncode=click.UsageError.exit_code) from exc
        try:
            with redirect_stdout(self.stdout._out):
                self.command.main(
                    args=list(args),
                    prog_name=f"manage.py {name}",
                    obj=CLIContext(app=app, no_color=no_color, workdir=None),
                    standalone_mode=False,
                )
        except click.ClickException as exc:
            raise CommandError(exc.format_message(), returncode=exc.exit_code) from exc
        except SystemExit as exc:
            if exc.code:
                code = exc.code if isinstance(exc.code, int) else 1
                raise CommandError(f"{name} ended with exit code {code}", returncode=code) from exc
