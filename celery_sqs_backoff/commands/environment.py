"""Find the directory for journals of redrives, open the app's store, and handle signals."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import click

from celery_sqs_backoff.store.records import Records
from celery_sqs_backoff.store.settings import records_of

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def journal_directory() -> Path | None:
    """Return the default directory of journals, or warn and return ``None`` if it is not writable.

    A journal names the messages that a redrive has sent. If the directory has journals, return it
    even if it is not writable. A killed run may have left its journal there. The redrive must then
    read that journal or fail, because otherwise the redrive would send the same messages again.
    """
    directory = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state", "celery-sqs-backoff")
    try:
        directory = directory.expanduser()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK) and not any(directory.glob("*.journal")):
            raise PermissionError(13, "not writable", str(directory))
    except (OSError, RuntimeError) as exc:  # RuntimeError: the user has no home directory
        click.echo(
            f"Warning: no journal ({exc}). If this run is killed, the next run may send messages"
            " again. Name a file with --journal.",
            err=True,
        )
        return None
    return directory


def open_records(app: Any) -> Records:
    """Return the object that reads and writes the records in the app's store.

    In a Django project, this function calls ``django.setup()`` first. The store may be in the
    project's database, and ``SECRET_KEY`` signs the records. ``celery`` itself does not call
    ``django.setup()`` for commands.

    Raises:
        ImproperlyConfigured: the app names no store, or an unknown store.
    """
    if "django.conf" in sys.modules and "DJANGO_SETTINGS_MODULE" in os.environ:
        import django  # type: ignore[import-untyped]
        from django.apps import apps  # type: ignore[import-untyped]

        if not apps.ready:  # manage.py has called setup() already
            django.setup()
    return records_of(app)


@contextmanager
def until_signalled(stop: threading.Event) -> Iterator[None]:
    """Set the event on the first SIGINT, SIGTERM or SIGHUP.

    After the first signal, the command still gives unsent messages back to SQS. The second signal
    raises KeyboardInterrupt. Messages that were not given back by then stay hidden until their
    visibility timeouts end. If the process ignores a signal (``nohup``), the signal stays ignored.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()
        for signalled in _SIGNALS:
            if signal.getsignal(signalled) is on_signal:
                signal.signal(signalled, signal.default_int_handler)
        with suppress(OSError):  # the terminal may be closed
            click.echo("Waiting for SQS's answers. Unsent messages will be given back.", err=True)
            click.echo("Press Ctrl-C again to end immediately.", err=True)

    with _handling(on_signal):
        yield


@contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt, as SIGINT does.

    If the process ignores a signal (``nohup``), the signal stays ignored.
    """
    with _handling(signal.default_int_handler):
        yield


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Call ``handler`` on signals until the block ends.

    Outside the main thread this function has no effect, because Python sets signal handlers only in
    the main thread.
    """
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for signalled, usual in before.items():
            signal.signal(signalled, usual)
