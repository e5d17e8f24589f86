"""Declare commands that report errors in one line on stderr, and end with documented exit codes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click
from celery.bin.base import CeleryCommand, handle_preload_options

from celery_sqs_backoff.sqs.errors import advice
from celery_sqs_backoff.sqs.find_queue import NOT_CREATED, NOT_PREDEFINED

from .app import is_fallback_app
from .exit_codes import ALWAYS, INTERRUPTED, MEANINGS, UNREACHABLE, USAGE
from .text import safe


class CommandFailed(click.ClickException):
    """Ends a command with ``Error: ...`` on stderr and an exit code from ``exit_codes``."""

    def __init__(self, message: object, code: int) -> None:
        super().__init__(safe(message, 2_000))
        self.exit_code = code  # type: ignore[misc]  # click declares it per class, not per object


def make_read_failure(what: str, why: object) -> CommandFailed:
    """Return the error for a failed request to SQS, with advice for the user.

    Arguments:
        what: the object that was not read, for example ``"queue mails"``.
        why: an error code, alone or with details in parentheses.
    """
    is_missing = str(why) in ("NonExistentQueue", NOT_CREATED, NOT_PREDEFINED)
    code = USAGE if is_missing else UNREACHABLE
    return CommandFailed(f"cannot read {what}: {why}. {advice(str(why))}", code)


def command(
    name: str, *, codes: Mapping[int, str | None], examples: str = ""
) -> Callable[[Callable[..., None]], click.Command]:
    """Return a decorator that turns a function into a Celery command.

    The function gets click's context and the options.

    Arguments:
        name: the name that the user types.
        codes: exit codes of this command, in addition to :data:`ALWAYS`, with their meanings.
            ``None`` = the meaning in :data:`MEANINGS`.
        examples: lines for the end of the help.
    """

    def declare(function: Callable[..., None]) -> click.Command:
        declared = click.command(name, cls=SqsCommand, codes=codes, examples=examples)
        return declared(click.pass_context(handle_preload_options(function)))

    return declare


class SqsCommand(CeleryCommand):  # type: ignore[misc]  # Celery is not typed
    """A command that lists its exit codes in its help.

    If the user interrupts the command, or does not confirm, it ends with code 130.
    """

    def __init__(
        self,
        *args: Any,
        codes: Mapping[int, str | None] | None = None,
        examples: str = "",
        **settings: Any,
    ) -> None:
        super().__init__(*args, **settings)
        self.codes = {code: MEANINGS.get(code, "") for code in ALWAYS}
        for code, meaning in (codes or {}).items():
            self.codes[code] = meaning or MEANINGS[code]
        self._examples = examples

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in their groups.

        Celery's own method would also show each argument, as an option without a name.
        """
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            found = param.get_help_record(ctx)
            if found is not None and not isinstance(param, click.Argument):
                # ``--help`` names no group, so it is shown in the last group.
                last = next(reversed(groups), "Options")
                groups.setdefault(getattr(param, "help_group", None) or last, []).append(found)
        for name, options in groups.items():
            with formatter.section(name):
                formatter.write_dl(options)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the exit codes, and the examples."""
        # A non-breaking space keeps a code and its meaning on one line.
        told = "; ".join(f"{code}\xa0{meaning}" for code, meaning in sorted(self.codes.items()))
        text = click.wrap_text(f"Exit codes: {told}.", formatter.width).replace("\xa0", " ")
        formatter.write_paragraph()
        formatter.write(f"{text}\n")
        if self._examples:
            with formatter.section("Examples"):
                for line in self._examples.strip().splitlines():
                    formatter.write(f"  {line.strip()}\n")

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, click.Abort) as exc:
            is_ctrl_c = isinstance(exc, KeyboardInterrupt) or isinstance(
                exc.__context__, KeyboardInterrupt
            )
            why = "interrupted" if is_ctrl_c else "nothing was done: the answer was not yes"
            raise CommandFailed(why, INTERRUPTED) from exc


def app_of(ctx: click.Context, *, needs_sqs: bool = False) -> Any:
    """Return the app that ``-A`` names.

    Arguments:
        needs_sqs: ``True`` = refuse an app with another broker than SQS. Default ``False``.

    Raises:
        CommandFailed: there is no such app, or its settings cannot be read, or ``needs_sqs``
            refuses its broker.
    """
    app = ctx.obj.app
    if is_fallback_app(app):
        raise CommandFailed(f"no app: name it with -A, as in celery -A proj {ctx.info_name}", USAGE)
    if needs_sqs:
        with loading_app():
            broker = app.connection_for_read().transport.driver_type
        if broker != "sqs":
            why = "check the app (-A) and its broker_url"
            raise CommandFailed(f"the broker is {broker}, not SQS: {why}", USAGE)
    return app


@contextmanager
def loading_app() -> Iterator[None]:
    """End the command with one line if the user's code or settings raise an error in this block.

    Raises:
        CommandFailed: the block raised an exception.
    """
    from celery_sqs_backoff.doctor.look import why_not_loaded

    try:
        yield
    except (Exception, SystemExit) as exc:
        raise CommandFailed(f"cannot load the app: {why_not_loaded(exc)}", USAGE) from exc
