"""Look at the queue, ask the user and redrive, for ``celery sqs-redrive`` and ``sqs-peek``.

With ``--json``, the last line of ``sqs-redrive`` is a ``Finished`` event, even if the run fails.
There is no event only if click refuses the command line, or if the app cannot be used.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import click

from celery_sqs_backoff.redrive import (
    Ended,
    RedriveError,
    RedriveRefused,
    RedriveReport,
    RedriveUnreachable,
    peek,
    redrive,
)
from celery_sqs_backoff.redrive.events import Finished, Started, as_dict
from celery_sqs_backoff.redrive.look import DEFAULT_SAMPLE, Plan
from celery_sqs_backoff.redrive.options import has_selection

from . import exit_codes
from .command import CommandFailed
from .environment import until_signalled
from .exit_codes import DONE, FOUND, INTERRUPTED, NOTHING_MATCHED, UNREACHABLE, USAGE
from .progress import show_progress
from .show import describe_cost, no_match, plan_as_dict, print_plan, print_report
from .text import counted


class Shell:
    """One invocation of ``sqs-redrive`` or ``sqs-peek``.

    Arguments:
        app: the Celery app.
        queue: name, URL or ARN of the queue.
        options: as for :func:`~celery_sqs_backoff.redrive`.
        as_json: print events on stdout instead of text for people.
    """

    def __init__(self, app: Any, queue: str, options: dict[str, Any], *, as_json: bool) -> None:
        self._app, self._queue, self._options = app, queue, options
        self._as_json = as_json
        self._has_ended = False  # whether ``Finished`` was printed for scripts
        self._journal: str | None = None
        self._report: RedriveReport | None = None
        self._has_started = False  # whether the command may have hidden messages

    @contextmanager
    def ending(self) -> Iterator[None]:
        """If the block raises an exception, end the command with an exit code.

        Before that, complete the output. With ``--json``, print the event ``Finished`` if it was
        not printed yet. Without ``--json``, print the report, if the run has made a report.
        """
        try:
            yield
        except (ValueError, TypeError, RedriveError, OSError, KeyboardInterrupt) as exc:
            if isinstance(exc, BrokenPipeError) and self._report is None:
                raise
            ended, code, text = _read_end(exc, may_hide=self._has_started)
            self._end(ended, text)
            if self._report is not None:
                self.print(self._report)
            raise CommandFailed(text, code) from exc

    def _end(self, ended: str, detail: str) -> None:
        if self._as_json and not self._has_ended:
            last = {"event": "Finished", "ended": ended, "detail": detail, "report": None}
            click.echo(json.dumps(last))

    def _print_event(self, event: Any) -> None:
        self._has_ended = isinstance(event, Finished)
        click.echo(json.dumps(as_dict(event), default=str))

    def print(self, report: RedriveReport) -> None:
        """Print the counts and the next step, for people."""
        if not self._as_json:
            print_report(report, queue=self._queue, options=self._options, journal=self._journal)

    def look(self, **settings: Any) -> Plan:
        """Look at the queue. Return the plan, which predicts a redrive.

        Arguments:
            settings: further arguments for ``peek``. An option of the command overrides an argument
                of the same name.
        """
        settings = {"sample": DEFAULT_SAMPLE, **settings, **self._options}
        stop = threading.Event()
        with ExitStack() as signals:
            # Until ``on_start``, no message is hidden, so a signal may end the command immediately.
            def on_start() -> None:
                signals.enter_context(until_signalled(stop))
                self._has_started = True

            plan = peek(self._app, self._queue, stop=stop, on_start=on_start, **settings)
        if stop.is_set():
            raise KeyboardInterrupt
        return plan

    def dry_run(self) -> int:
        """Look, print the plan of a redrive, and return the exit code."""
        if self._options["restore"] is not None:
            raise ValueError("--restore cannot be used with --dry-run")
        archive = self._options["dump"]
        plan = self.look(copy=archive, sample=None) if archive else self.look()
        if self._as_json:
            click.echo(json.dumps(plan_as_dict(plan), default=str))
        else:
            print_plan(plan, err=False)
        click.echo(describe_cost(plan), err=True)
        self._refuse_if_too_late(plan)
        self._end("done", "a dry run: no message was sent")
        if not has_selection(self._options) or plan.matching:
            return DONE
        click.echo(no_match(plan), err=True)
        return NOTHING_MATCHED

    def _refuse_if_too_late(self, plan: Plan) -> None:
        if plan.is_too_late and not self._options["force"]:
            raise RedriveRefused(
                "SQS will delete the oldest messages before they can be sent. Raise the rate, or"
                " the queue's retention period.",
                overridable=True,
            )

    def ask(self, *, is_answered: bool) -> int | None:
        """Look, print the plan, and ask the user. Return the exit code, or ``None`` to go on.

        For a restore, only ask. If there are messages with outcome UNKNOWN, ask whether to send
        them, too. Keep the answer in the option ``include_unknown``.

        With ``--yes``, ask nothing, and print no plan. If there is also a ``--rate``, but neither
        ``--delete`` nor ``--force``, still look. Refuse the run if SQS would delete messages before
        they can be sent at this rate.

        Arguments:
            is_answered: whether ``--yes`` was given.

        Raises:
            RedriveRefused: SQS would delete messages before they can be sent.
        """
        options = self._options
        if is_answered:
            if options["rate"] and not (options["delete"] or options["force"]):
                self._refuse_if_too_late(self.look())
            return None
        if (archive := options["restore"]) is not None:
            question = f"Put the messages of {archive} back on {self._queue}?"
            return None if self._confirm(question) else self._decline()
        plan = self.look()
        print_plan(plan, err=True)
        click.echo(describe_cost(plan), err=True)
        self._refuse_if_too_late(plan)
        if not plan.matching and plan.looked_at >= plan.messages:
            text = "No message matched." if plan.messages else "There is no message."
            click.echo(text, err=True)
            self._end("done", text)
            return NOTHING_MATCHED if has_selection(options) else DONE
        if plan.unknown:
            about = "" if plan.looked_at >= plan.messages else "about "
            count = round(plan.messages * plan.unknown / plan.looked_at)
            options["include_unknown"] = self._confirm(
                f"{about}{count} of them may have been DONE ALREADY (outcome UNKNOWN): a replay may"
                " do them twice. Send them, too?"
            )
            plan.ready += plan.unknown * options["include_unknown"]
        return None if self._confirm(self._question(plan)) else self._decline()

    def _question(self, plan: Plan) -> str:
        options = self._options
        about = "" if plan.looked_at >= plan.messages else "about "
        what = "DELETE, without sending," if options["delete"] else "Send"
        rate = f" at {options['rate']}" if options["rate"] else ", as fast as SQS takes them"
        messages = counted(plan.to_send, "message")
        question = f"{what} {about}{messages}{'' if options['delete'] else rate}?"
        if not plan.matching:
            question = f"{no_match(plan)} {what} the other messages that match?"
        return question + " There is no undo."

    def _decline(self) -> int:
        self._end("declined", "the question was not answered with yes")
        return INTERRUPTED

    def _confirm(self, question: str) -> bool:
        try:
            if sys.stdin is None:  # the parent process closed stdin
                raise click.Abort
            return click.confirm(question, err=True)
        except click.Abort as exc:
            if isinstance(exc.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            why = "Nothing was sent: there is no terminal to ask on."
            click.echo(f"\n{why} Pass --yes to send without asking.", err=True)
            sys.exit(self._decline())

    def run(self) -> RedriveReport:
        """Redrive, and show the progress."""
        rate = self._options["rate"]
        shown = nullcontext(self._print_event) if self._as_json else show_progress()
        stop = threading.Event()
        with ExitStack() as signals, shown as on_event:

            def note(event: Any) -> None:
                if isinstance(event, Started):  # until then, a signal ends the command immediately
                    signals.enter_context(until_signalled(stop))
                    self._has_started, self._journal = True, event.journal
                    if not (rate or self._options["delete"] or self._options["restore"]):
                        click.echo("Warning: no --rate: as fast as SQS takes them.", err=True)
                elif isinstance(event, Finished):
                    self._report = event.report
                # After a signal the terminal may be closed.
                with suppress(OSError) if stop.is_set() else nullcontext():
                    on_event(event)

            try:
                return redrive(self._app, self._queue, on_event=note, stop=stop, **self._options)
            except (ValueError, TypeError) as exc:
                if self._report is None:  # the run did not begin, because an option is wrong
                    raise
                raise RedriveError(f"{type(exc).__name__}: {exc}") from exc


def _read_end(exc: BaseException, *, may_hide: bool) -> tuple[str, int, str]:
    """Return the word for ``Finished.ended``, the exit code and the text for an error.

    ``may_hide``: whether the command may have made messages invisible before the error.
    """
    if isinstance(exc, KeyboardInterrupt):
        hidden = "hidden messages reappear within 15 min" if may_hide else "no message was received"
        return "interrupted", INTERRUPTED, f"interrupted: {hidden}"
    if isinstance(exc, RedriveUnreachable):
        return "unreachable", UNREACHABLE, str(exc)
    if isinstance(exc, ValueError | TypeError | RedriveRefused):
        return "refused", USAGE, f"{exc}{' (--force)' if getattr(exc, 'overridable', 0) else ''}"
    return "failed", FOUND, f"{exc}. Unsent messages are given back."


_OF_END = {
    Ended.UNREACHABLE: UNREACHABLE,
    Ended.INTERRUPTED: INTERRUPTED,
    Ended.GATE: exit_codes.GATE,
    Ended.FAILED: FOUND,
    Ended.ERROR: FOUND,
}


def exit_code(report: RedriveReport, options: Mapping[str, Any]) -> int:
    """Return the exit code for a report. If several codes apply, return the most serious one."""
    if report.ended in _OF_END:
        return _OF_END[report.ended]
    # With include_unknown, the run has resent the messages in doubt, so the user need not decide
    # whether to resend them.
    in_doubt = 0 if options.get("include_unknown") else report.in_doubt
    if report.failed or report.not_deleted or in_doubt:
        return FOUND
    if report.ended is Ended.INCOMPLETE:
        return exit_codes.INCOMPLETE
    if report.poison:
        return exit_codes.POISON
    done = report.sent + report.dropped + report.deleted
    return NOTHING_MATCHED if has_selection(options) and not done else DONE
