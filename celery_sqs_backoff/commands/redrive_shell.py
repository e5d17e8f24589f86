"""One ``celery sqs-redrive``: looks, asks, runs, and ends with a last event in every case."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import click

from celery_sqs_backoff.redrive import RedriveError, RedriveRefused, RedriveReport, peek, redrive
from celery_sqs_backoff.redrive.events import Audit, Finished, Started, as_dict, is_logged
from celery_sqs_backoff.redrive.look import DEFAULT_SAMPLE, Plan

from .environment import until_signalled
from .exit_codes import DONE, INTERRUPTED, NOTHING_MATCHED
from .options import has_selection
from .progress import JsonEvents, bar, finished
from .show import looked, no_match, plan_as_dict, print_plan, print_report
from .text import safe


class Shell:
    """Make one per invocation.

    Arguments:
        options: as for :func:`~celery_sqs_backoff.redrive`.
        as_json: print events on stdout, and nothing for people.
    """

    def __init__(self, app: Any, queue: str, options: dict[str, Any], *, as_json: bool) -> None:
        self._app, self._queue, self._options = app, queue, options
        self._as_json = as_json
        self._events = JsonEvents()
        self._journal: str | None = None
        self._report: RedriveReport | None = None

    def end(self, ended: str, detail: str) -> None:
        """Say it to a script, too, unless the run itself has."""
        if self._as_json and not self._events.has_finished:
            click.echo(json.dumps(finished(ended, detail)))

    def fail(self, ended: str, detail: str) -> None:
        """End it early, with the counts of what was done, if something was."""
        self.end(ended, detail)
        if self._report is not None:
            self.print(self._report)

    def print(self, report: RedriveReport) -> None:
        if not self._as_json:
            print_report(report, queue=self._queue, options=self._options, journal=self._journal)

    def dry_run(self) -> int:
        if self._options["restore"] is not None:
            raise ValueError("--restore takes no --dry-run")
        archive: Path | None = self._options["dump"]
        plan = self._look(copy=archive)
        if self._as_json:
            shown = plan_as_dict(plan, show_arguments=False, show_bodies=False)
            click.echo(json.dumps(shown, default=str))
        else:
            print_plan(plan, err=False)
        click.echo(looked(plan), err=True)
        self._refuse_if_too_late(plan)
        self.end("done", "a dry run: nothing was sent")
        if not has_selection(self._options) or plan.matching:
            return DONE
        click.echo(no_match(plan), err=True)
        return NOTHING_MATCHED

    def refuse_if_too_late(self) -> None:
        """Look before a slow run that nobody is asked about: SQS may delete messages first."""
        if self._options["rate"] and not self._options["delete"] and not self._options["force"]:
            self._refuse_if_too_late(self._look())

    def ask(self) -> int | None:
        """Look, tell, and ask. Returns the exit code, unless it is to go on."""
        options = self._options
        if (archive := options["restore"]) is not None:
            question = f"Put the messages of {archive} back on {self._queue}?"
            return None if self._asked(question) else self._declined()
        plan = self._look()
        print_plan(plan, err=True)
        click.echo(looked(plan), err=True)
        self._refuse_if_too_late(plan)
        if (code := self._nothing_to_ask(plan)) is not None:
            return code
        if plan.unknown and not options["include_unknown"] and not options["delete"]:
            options["include_unknown"] = self._asked(
                f"{self._estimated(plan, plan.unknown)} of them may have been DONE ALREADY (outcome"
                " UNKNOWN): a replay may do them twice. Send these, too?"
            )
            plan = self._look() if options["include_unknown"] else plan
        return None if self._asked(self._question(plan)) else self._declined()

    def _nothing_to_ask(self, plan: Plan) -> int | None:
        if plan.matching or plan.looked_at < plan.messages:
            return None
        text = "No message matched." if plan.messages else "There is no message."
        click.echo(text, err=True)
        self.end("done", text)
        return NOTHING_MATCHED if has_selection(self._options) else DONE

    def _question(self, plan: Plan) -> str:
        options = self._options
        about = "" if plan.looked_at >= plan.messages else "about "
        what = "DELETE, without sending," if options["delete"] else "Send"
        rate = f" at {options['rate']}" if options["rate"] else ", as fast as SQS takes them"
        question = f"{what} {about}{plan.to_send} messages{'' if options['delete'] else rate}?"
        if not plan.matching:
            question = f"{no_match(plan)} {what} those of the others that do?"
        return question + " There is no undo."

    def _declined(self) -> int:
        self.end("declined", "the question was not answered with yes")
        return INTERRUPTED

    def run(self) -> RedriveReport:
        rate = self._options["rate"]
        shown = nullcontext(self._events) if self._as_json else bar()
        with until_signalled() as stop, shown as on_event:

            def note(event: Any) -> None:
                if isinstance(event, Started):
                    self._journal = event.journal
                    if not (rate or self._options["delete"] or self._options["restore"]):
                        click.echo("Warning: no --rate: as fast as SQS takes them.", err=True)
                elif isinstance(event, Finished):
                    self._report = event.report
                elif isinstance(event, Audit) and not (self._as_json or is_logged()):
                    click.echo(f"audit: {safe(json.dumps(as_dict(event)), 20_000)}", err=True)
                with suppress(OSError) if stop.is_set() else nullcontext():  # it has hung up
                    on_event(event)

            try:
                return redrive(self._app, self._queue, on_event=note, stop=stop, **self._options)
            except (ValueError, TypeError) as exc:
                if self._report is None:  # an option
                    raise
                raise RedriveError(f"{type(exc).__name__}: {exc}") from exc

    def _asked(self, question: str) -> bool:
        try:
            if sys.stdin is None:  # closed by whoever has started us
                raise click.Abort
            return click.confirm(question, err=True)
        except click.Abort as exc:
            if isinstance(exc.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            click.echo("No answer. Without a terminal give --yes.", err=True)
            sys.exit(self._declined())

    @staticmethod
    def _estimated(plan: Plan, found: int) -> str:
        if plan.looked_at >= plan.messages:
            return str(found)
        return f"about {round(plan.messages * found / max(1, plan.looked_at))}"

    def _look(self, copy: Path | None = None) -> Plan:
        sample = None if copy else DEFAULT_SAMPLE
        with until_signalled() as stop:
            plan = peek(
                self._app, self._queue, sample=sample, copy=copy, stop=stop, **self._options
            )
        if stop.is_set():
            raise KeyboardInterrupt
        return plan

    def _refuse_if_too_late(self, plan: Plan) -> None:
        if plan.is_too_late and not self._options["force"]:
            raise RedriveRefused(
                "SQS will delete the oldest messages before their turn comes. Raise the rate, or"
                " the queue's retention period.",
                overridable=True,
            )
