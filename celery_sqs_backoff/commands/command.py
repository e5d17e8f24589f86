"""The class of all commands: how one ends whose output nobody takes."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from typing import Any, Final

import click
from celery.bin.base import CeleryCommand

from .exit_codes import INTERRUPTED

#: Whoever read stdout has gone (``| head``): the code of a program that SIGPIPE ends.
NOBODY_READS: Final = 141
#: stdout could not be written: the disk is full, for one. (``EX_IOERR`` of sysexits.h.)
NOT_WRITTEN: Final = 74


#: What a write to stdout fails with, beside a closed pipe.
_OF_WRITING: Final = frozenset({errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC})


class Command(CeleryCommand):  # type: ignore[misc]  # Celery is not typed
    """Ends with codes of its own for Ctrl-C and if stdout fails: click's 1 has other meanings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in their groups. Celery's own shows arguments as empty options."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            found = param.get_help_record(ctx)
            if found is not None and not isinstance(param, click.Argument):
                last = next(reversed(groups), "Options")  # of --help, which has no group
                groups.setdefault(getattr(param, "help_group", None) or last, []).append(found)
        for name, options in groups.items():
            with formatter.section(name):
                formatter.write_dl(options)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        except BrokenPipeError:
            drop_stdout()
            sys.exit(NOBODY_READS)
        except OSError as exc:
            if exc.errno not in _OF_WRITING or exc.filename is not None:
                raise
            drop_stdout()
            click.echo(f"Error: cannot print the result: {exc.strerror}", err=True)
            sys.exit(NOT_WRITTEN)
        finally:
            _flush_or_drop_stdout()


def _flush_or_drop_stdout() -> None:
    """A command that has said so itself keeps its code."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):
        drop_stdout()


def drop_stdout() -> None:
    """Else Python tries again at the end of the process, says so, and changes the exit code.

    https://docs.python.org/3/library/signal.html#note-on-sigpipe
    """
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
