"""``celery sqs-doctor``: is the set-up right, before an outage shows that it is not?"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Final

import click
from celery.bin.base import handle_preload_options

from celery_sqs_backoff.doctor import RULES, Finding, Rule, Severity, asked, examine
from celery_sqs_backoff.sqs.find_queue import why_not

from .command import Command
from .options import option, queues_option, select_queues

#: No error, and with --strict no warning.
HEALTHY: Final = 0
#: At least one error, or with --strict at least one warning.
FOUND: Final = 1
#: The app cannot be loaded, SQS or a queue cannot be read, or the broker is not SQS.
COULD_NOT_LOOK: Final = 5

#: Queues that the last line names.
_MOST_NAMES: Final = 5

_EPILOG = """\b
Exit codes: 0 no error, 1 at least one error or with --strict a warning, 2 usage, 5 could not look.

\b
Examples:
  celery -A proj sqs-doctor
  celery -A proj sqs-doctor -Q mails,bulk
  celery -A proj sqs-doctor --explain W010
  celery -A proj sqs-doctor --ignore 'I014=our bodies are small' --format json
  celery -A proj sqs-doctor --offline
"""


@click.command("sqs-doctor", cls=Command, epilog=_EPILOG)
@queues_option
@option("What to look at", "--offline", is_flag=True, help="Ask neither SQS nor the store.")
@option(
    "What to look at",
    "--ignore",
    multiple=True,
    metavar="ID[:SUBJECT]=REASON",
    help="Leave out a finding, with the reason why you can live with it. Can be repeated.",
)
@option("Output", "--strict", is_flag=True, help="Exit with 1 for warnings too.")
@option("Output", "--explain", metavar="ID", help="Say what a rule is about, and exit.")
@option(
    "Output",
    "--format",
    "form",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="What to print on stdout.",
)
@click.pass_context
@handle_preload_options  # type: ignore[untyped-decorator]  # Celery is not typed
def sqs_doctor(
    ctx: click.Context,
    queues: list[str] | None,
    offline: bool,
    ignore: tuple[str, ...],
    strict: bool,
    explain: str | None,
    form: str,
) -> None:
    """Check queues, dead-letter queues, tasks and settings; nothing is changed.

    Queues are read with GetQueueAttributes. Permissions are tried with a receipt handle that does
    not exist, so no message is touched.
    """
    if explain is not None:
        click.echo(_explanation(_rule(explain)))
        return
    from celery_sqs_backoff.doctor.look import ignored_by, load_tasks, look, why_not_loaded

    ignored = [_ignored(text) for text in ignore]
    app = ctx.obj.app
    try:
        load_tasks(app)
        facts = look(app, live=False)
    except (Exception, SystemExit) as exc:  # noqa: BLE001  # of a task, its options or a setting
        click.echo(f"Error: cannot load the app: {why_not_loaded(exc)}", err=True)
        sys.exit(COULD_NOT_LOOK)
    select_queues(app, queues)
    try:
        facts = facts if offline else look(app, are_named=bool(queues))
    except Exception as exc:  # noqa: BLE001  # whatever it is, we could not look
        click.echo(f"Error: cannot look at SQS: {why_not(exc)}", err=True)
        sys.exit(COULD_NOT_LOOK)
    findings = examine(facts, ignore=[*ignored, *ignored_by(app)], live=not offline)
    for queue in facts.unread:
        click.echo(f"Error: cannot read queue {queue.name}: {queue.failure}", err=True)
    if facts.other_broker is not None:
        click.echo(f"Error: no queue was looked at: the broker is {facts.other_broker}", err=True)
    subjects = [queue.name for queue in facts.queues if queue not in facts.unread]
    could_look = not facts.unread and facts.other_broker is None
    if form == "text":
        looked_at = f"{len(asked(live=not offline))} rules, {_named(subjects)}"
        click.echo(_text(findings, looked_at, could_look=could_look))
    else:
        click.echo(_json(findings))
    sys.exit(_exit_code(findings, strict=strict, could_look=could_look))


def _exit_code(findings: Sequence[Finding], *, strict: bool, could_look: bool) -> int:
    serious = {Severity.ERROR, Severity.WARNING} if strict else {Severity.ERROR}
    if any(finding.severity in serious for finding in findings):
        return FOUND
    return HEALTHY if could_look else COULD_NOT_LOOK


def _rule(wanted: str, option: str = "--explain") -> Rule:
    for rule in RULES:
        if rule.id == wanted.upper():
            return rule
    raise click.BadParameter(
        f"there is no rule {wanted!r}; rules are {', '.join(r.id for r in RULES)}",
        param_hint=option,
    )


def _ignored(text: str) -> str:
    what, _, reason = text.partition("=")
    rule, colon, subject = what.partition(":")
    if not reason.strip():
        raise click.BadParameter(
            f"{text!r} gives no reason: expected 'ID=REASON', for example 'I014=bodies are small'",
            param_hint="--ignore",
        )
    return f"{_rule(rule, '--ignore').id}{colon}{subject}"


def _explanation(rule: Rule) -> str:
    return f"{rule.id} ({rule.severity.value}): {rule.title}\n\n{rule.why}"


def _text(findings: Sequence[Finding], looked_at: str, *, could_look: bool) -> str:
    lines = []
    for finding in findings:
        lines += [
            f"{finding.severity.value.upper()} {finding.id} {finding.subject}: {finding.evidence}",
            f"    {finding.consequence}",
        ]
        lines += [f"    $ {finding.fix.aws}"] if finding.fix.aws else []
        lines += [f"    {finding.fix.terraform} (Terraform)"] if finding.fix.terraform else []
        lines += [f"    {finding.fix.text}"] if finding.fix.text else []
        lines.append("")
    counts = {s: sum(f.severity is s for f in findings) for s in Severity}
    told = ", ".join(f"{n} {s.value}{'s' if n != 1 else ''}" for s, n in counts.items() if n)
    nothing = "all well" if could_look else "nothing found, and not all could be read"
    return "\n".join([*lines, f"{looked_at}: {told or nothing}"])


def _named(queues: Sequence[str]) -> str:
    """Which queues were looked at: they need not be those that workers consume."""
    more = len(queues) - _MOST_NAMES
    names = ", ".join(queues[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
    count = f"{len(queues)} queue{'s' if len(queues) != 1 else ''}"
    return f"{count} ({names})" if queues else count


def _json(findings: Sequence[Finding]) -> str:
    return json.dumps({"findings": [finding.as_dict() for finding in findings]}, indent=2)
