"""``celery sqs-doctor``: find faults in the set-up that could lose or repeat messages."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Final

import click

from celery_sqs_backoff.doctor import RULES, Finding, Rule, Severity, examine, select_rules
from celery_sqs_backoff.sqs.find_queue import why_not
from celery_sqs_backoff.text import name_some

from .command import app_of, command, loading_app, make_read_failure
from .exit_codes import DONE, FOUND, UNREACHABLE
from .options import option, queues_option, select_queues
from .text import counted

#: The last line names at most this number of queues.
_MOST_NAMES: Final = 5


@command(
    "sqs-doctor",
    codes={
        DONE: "no error",
        FOUND: "at least one error, or with --strict a warning",
        UNREACHABLE: "a queue could not be read",
    },
    examples="""
        celery -A proj sqs-doctor
        celery -A proj sqs-doctor -Q mails,bulk
        celery -A proj sqs-doctor --explain W010
        celery -A proj sqs-doctor --format json
        celery -A proj sqs-doctor --offline
    """,
)
@queues_option
@option("What to look at", "--offline", help="Ask neither SQS nor the store.")
@option("Output", "--strict", help="Exit with 1 for warnings, too.")
@option("Output", "--explain ID", help="Explain a rule, and exit.")
@option(
    "Output",
    *("--format", "form"),
    type=click.Choice(["text", "json"]),
    default="text",
    help="Format of the output on stdout.",
)
def sqs_doctor(
    ctx: click.Context,
    queues: list[str] | None,
    offline: bool,
    strict: bool,
    explain: str | None,
    form: str,
) -> None:
    """Check queues, dead-letter queues, tasks and settings, without changing any of them.

    The command reads queues with GetQueueAttributes. It tries permissions with a receipt handle
    that does not exist, so it touches no message. In the store, it adds and deletes a test record.
    """
    if explain is not None:
        click.echo(_explanation(_rule(explain)))
        return
    from celery_sqs_backoff.doctor.look import load_tasks, look, read_ignored

    app = app_of(ctx, needs_sqs=not offline)
    with loading_app():
        load_tasks(app)
        facts = look(app, live=False)
    select_queues(app, queues)
    try:
        facts = facts if offline else look(app, are_named=bool(queues))
    except Exception as exc:  # kombu and botocore may raise any of many types
        raise make_read_failure("the queues", why_not(exc)) from exc
    findings = examine(facts, ignore=read_ignored(app), live=not offline)
    for queue in facts.unread:
        make_read_failure(f"queue {queue.name}", queue.failure).show()
    if form == "text":
        subjects = [queue.name for queue in facts.queues if queue not in facts.unread]
        looked_at = f"{len(select_rules(live=not offline))} rules, {_name_queues(subjects)}"
        click.echo(_text(findings, looked_at, could_look=not facts.unread))
    else:
        shown = {"findings": [finding.as_dict() for finding in findings]}
        click.echo(json.dumps(shown, indent=2))
    serious = {Severity.ERROR, Severity.WARNING} if strict else {Severity.ERROR}
    if any(finding.severity in serious for finding in findings):
        sys.exit(FOUND)
    sys.exit(UNREACHABLE if facts.unread else DONE)


def _rule(wanted: str) -> Rule:
    for rule in RULES:
        if rule.id == wanted.upper():
            return rule
    raise click.BadParameter(
        f"there is no rule {wanted!r}; rules are {', '.join(r.id for r in RULES)}",
        param_hint="--explain",
    )


def _explanation(rule: Rule) -> str:
    return f"{rule.id} ({rule.severity.value}): {rule.title}\n\n{rule.why}"


def _text(findings: Sequence[Finding], looked_at: str, *, could_look: bool) -> str:
    lines = []
    for finding in findings:
        fix = finding.fix
        lines += [
            f"{finding.severity.value.upper()} {finding.id} {finding.subject}: {finding.evidence}",
            f"    {finding.consequence}",
            *([f"    $ {fix.aws}"] if fix.aws else []),
            *([f"    {fix.terraform} (Terraform)"] if fix.terraform else []),
            *([f"    {fix.text}"] if fix.text else []),
            "",
        ]
    counts = {s: sum(f.severity is s for f in findings) for s in Severity}
    told = ", ".join(counted(n, s.value) for s, n in counts.items() if n)
    nothing = "no findings" if could_look else "no findings, but some queues could not be read"
    return "\n".join([*lines, f"{looked_at}: {told or nothing}"])


def _name_queues(queues: Sequence[str]) -> str:
    """Return the number and names of the queues that were read.

    Workers may consume further queues. By the names, the user can see which queues are missing.
    """
    count = counted(len(queues), "queue")
    return f"{count} ({name_some(queues, _MOST_NAMES)})" if queues else count
