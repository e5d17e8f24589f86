"""Print plans and reports for people.

A plan is the result of a look at the queue, and predicts a redrive. A report has the numbers of a
redrive that has ended. Control codes in texts from messages are escaped.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import click

from celery_sqs_backoff.redrive import Ended, Plan, RedriveReport
from celery_sqs_backoff.redrive.look import MessageFacts
from celery_sqs_backoff.redrive.message import DlqMessage
from celery_sqs_backoff.redrive.options import has_selection
from celery_sqs_backoff.sqs.envelope import arguments
from celery_sqs_backoff.units import spell_duration

from .text import counted, safe

#: A histogram shows at most this number of lines.
_TOP = 10

#: Arguments or a body with more characters are cut.
_MOST_OF_A_BODY = 1_048_576

_COLUMNS = ("id", "task", "task id", "age", "outcome", "reason", "error")


def print_plan(plan: Plan, *, err: bool) -> None:
    """Print a plan. ``err``: print it to stderr, because stdout is for another result."""
    for line in _plan_lines(plan):
        click.echo(line, err=err)


def _plan_lines(plan: Plan) -> Iterator[str]:
    messages = counted(plan.messages, "message")
    yield f"{_heading(safe(plan.source))}: {messages}, {plan.looked_at} looked at"
    if plan.matching != plan.looked_at:
        yield f"{plan.matching} of them match"
    for title, histogram in (
        ("by task", plan.by_task),
        ("by outcome", plan.by_outcome),
        ("by reason", plan.by_reason),
        ("by age", plan.by_age),
        ("goes to", plan.by_destination),
        ("predicted action", plan.by_action),
    ):
        if histogram:
            yield _heading(title)
            shown = histogram.most_common(_TOP)
            width = len(str(shown[0][1]))
            yield from (f"{count:{width}}  {safe(name)}" for name, count in shown)
        if len(histogram) > _TOP:
            rest = histogram.total() - sum(count for _, count in shown)
            yield f"  and {len(histogram) - _TOP} more, {counted(rest, 'message')}"
    if plan.unknown:
        yield (
            f"{plan.unknown} may have been done already (outcome UNKNOWN): find out before they are"
            " sent again"
        )
    if (expires_in := plan.oldest_expires_in_seconds) is not None:
        yield f"oldest expires in {spell_duration(expires_in)}"
    if plan.duration_seconds is not None:
        yield f"takes about {spell_duration(plan.duration_seconds)} at this rate"


def _heading(text: str) -> str:
    return click.style(text, bold=True)


def describe_cost(plan: Plan) -> str:
    """Return a text about the receives that SQS has counted for a look."""
    cost = "Each message looked at was received once more, which SQS counts"
    if not plan.not_given_back:
        return f"{cost}, and given back."
    return (
        f"{cost}. SQS did not give back {plan.not_given_back} of them immediately. They stay"
        " hidden for up to 15 min."
    )


def no_match(plan: Plan) -> str:
    """Return the sentence to print if no message matches the options."""
    if plan.looked_at >= plan.messages:
        return "No message matched."
    return f"None of the {plan.looked_at} looked at match; there are {plan.messages}."


def print_messages(plan: Plan, *, show_arguments: bool) -> None:
    """Print a table with one line per message. ``show_arguments``: also print task arguments."""
    click.echo("  ".join(_COLUMNS))
    for fact in plan.letters:
        click.echo(_line(fact))
        if show_arguments and fact.raw is not None:
            shown = _arguments(fact.raw.body)
            text = shown if isinstance(shown, str) else json.dumps(shown)
            click.echo(f"  {safe(text, _MOST_OF_A_BODY)}")
    if len(plan.letters) < plan.matching:
        click.echo(f"and {plan.matching - len(plan.letters)} more")


def print_whole(plan: Plan) -> None:
    """Print all facts of each message except its arguments and body."""
    for fact in plan.letters:
        for name, value in {**_record(fact.raw), **_fields(fact)}.items():
            if value in (None, "", False):
                continue
            if name == "traceback":
                click.echo("traceback:")
                for line in str(value).splitlines():
                    click.echo(f"  {safe(line, 2_000)}")
            else:
                click.echo(f"{safe(name)}: {safe(value, 2_000)}")
        for name, attribute in (fact.raw.attributes if fact.raw else {}).items():
            click.echo(f"attribute {safe(name)}: {safe(attribute.get('StringValue', '(binary)'))}")


def plan_as_dict(plan: Plan, *, show_arguments: bool = False) -> dict[str, Any]:
    """Return a plan as values for JSON."""
    letters = []
    for fact in plan.letters:
        shown = _fields(fact)
        if show_arguments and fact.raw is not None:
            shown["arguments"] = _arguments(fact.raw.body)
        letters.append(shown)
    facts = {name: value for name, value in vars(plan).items() if name != "letters"}
    numbers = {"to_send": plan.to_send, "duration_seconds": plan.duration_seconds}
    return {"event": "Plan", **facts, **numbers, "messages_looked_at": letters}


def print_report(
    report: RedriveReport, *, queue: str, options: Mapping[str, Any], journal: str | None
) -> None:
    """Print the counts and the next step on stdout."""
    fields = asdict(report)
    ended, detail = report.ended.value, safe(fields.pop("detail"), 1_000)
    del fields["ended"]
    click.echo(f"{ended}{f': {detail}' if detail else ''}")
    click.echo("  ".join(f"{name} {value}" for name, value in fields.items()))
    for sentence in closing(report, queue=queue, options=options, journal=journal):
        click.echo(sentence)


def closing(
    report: RedriveReport, *, queue: str, options: Mapping[str, Any], journal: str | None
) -> list[str]:
    """Return the sentences to print below a report.

    The sentences count the sent messages and, by reason, the messages that stay in the queue. If
    the user should go on, the last sentence names the next command.
    """
    name, looked_at = shlex.quote(queue), report.looked_at - report.returned
    deletes, selects = bool(options.get("delete")), has_selection(options)
    number = report.dropped if deletes else report.sent
    done, undone = ("deleted unsent", "deleted") if deletes else ("sent", "sent")
    put_back_before, skipped = 0, "have expired and stay (--expired extend)"
    if options.get("restore"):
        done, skipped = f"put back on {name}", "were on the queue already and were not sent"
        if report.ended is Ended.DONE:
            left = report.failed + report.skipped + report.in_doubt
            put_back_before = max(0, looked_at - number - left)
    doubt = "twice" if options.get("include_unknown") else "already"
    # With a selection, "3 of 100 sent" would read as if 97 messages had failed.
    found = [
        f"{number} {done}, {looked_at} looked at."
        if selects
        else f"{number} of {looked_at} {done}."
    ]
    for count, sentence in (
        (put_back_before, f"had been put back by an earlier run, as {journal} says"),
        (report.sent_before, "had been sent by an earlier run and were only deleted"),
        (report.returned, "came back and stay"),
        (report.poison - report.returned, "were replayed too often and stay (--max-replays)"),
        (report.failed, f"could not be {undone} and stay"),
        (report.unknown, "may have been done already and stay (--include-unknown)"),
        # With a selection, ``skipped`` also counts messages that are not selected.
        (not selects and report.skipped - report.unknown, skipped),
        (report.in_doubt, f"may have been sent {doubt}; their ids are above (--include-unknown)"),
        (report.not_deleted, "are sent, and SQS has not confirmed that it deleted them"),
    ):  # fmt: skip
        if count:
            found.append(f"{count} {sentence}.")
    if report.not_deleted and not journal:
        found.append("Without a journal, the next run sends these again.")
    has_done = report.sent or report.dropped or report.sent_before or report.failed
    if report.ended not in (Ended.DONE, Ended.INCOMPLETE):
        found.append("Unsent messages are in the queue.")
    elif report.ended is Ended.DONE and not looked_at:
        found.append("There was no message.")
    elif report.ended is Ended.DONE and selects and not has_done:
        found.append("No message matched, or no matching message may be sent.")
    peek = f"sqs-peek {name}{' --force' if options.get('force') else ''} --messages"
    if report.ended is not Ended.DONE or report.not_deleted:
        resumed = f", which continues from {journal}" if journal else ""
        found.append(f"Next: sqs-redrive {name} ...{resumed}")
    elif report.failed or report.poison or report.in_doubt:
        found.append(f"Next: {peek}")
    elif report.unknown:
        found.append(f"Next: {peek} --outcome UNKNOWN")
    elif (
        report.sent
        and report.remaining > report.skipped
        and not (options.get("limit") or options.get("restore"))
    ):  # these messages are new, or came back after the last receive
        found.append(f"{report.remaining} are on the queue now: look with {peek}")
    return found


def _line(fact: MessageFacts) -> str:
    age = "?" if fact.age_seconds is None else spell_duration(fact.age_seconds)
    marks = " expired" if fact.expired else ""
    marks += f" replayed {fact.replays}x" if fact.replays else ""
    cells = (
        fact.id, fact.task or "-", fact.task_id or "-", age,
        fact.outcome or "-", fact.reason or "-", fact.error or "-",
    )  # fmt: skip
    return "  ".join(safe(cell) for cell in cells) + marks


def _fields(fact: MessageFacts) -> dict[str, Any]:
    return {name: value for name, value in vars(fact).items() if name != "raw"}


def _record(message: DlqMessage | None) -> dict[str, Any]:
    record = message and message.record
    return asdict(record) if record else {}


def _arguments(body: str) -> Any:
    """Return the arguments of a message's task if they are JSON. Otherwise return the body."""
    found = arguments(body)
    return body if found is None else found
