"""The tables in the documentation that are made from code.

``python -m tests.tables`` writes them between their marks in the pages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from celery_sqs_backoff.classifiers import botocore, httpx, requests, sdk, smtplib, urllib
from celery_sqs_backoff.classifiers.answers import STATUSES, StatusRule
from celery_sqs_backoff.classifiers.exchange import Finding, Meaning, Rule
from celery_sqs_backoff.observe.events import ALL
from celery_sqs_backoff.observe.instruments import INSTRUMENTS

DOCS = Path(__file__).parents[1] / "docs"

#: The rules of each library by the name of its classifier.
LIBRARIES: Mapping[str, tuple[Rule, ...]] = {
    "requests": requests.RULES,
    "httpx": httpx.RULES,
    "urllib": urllib.RULES,
    "botocore": botocore.RULES,
    "smtplib": smtplib.RULES,
    "sdk": sdk.RULES,
}


def metrics() -> str:
    """Return the table of metrics."""
    rows = [
        (
            f"`{one.prometheus_name}`",
            one.kind.value,
            ", ".join(f"`{label}`" for label in one.labels),
            one.text,
        )
        for one in INSTRUMENTS
    ]
    return _table(("metric", "kind", "labels", "what"), rows)


def events() -> str:
    """Return the table of events."""
    first_sentences = [(inspect.getdoc(kind) or "").partition("\n\n")[0] for kind in ALL]
    rows = [
        (f"`{kind.__name__}`", text.replace("\n", " "))
        for kind, text in zip(ALL, first_sentences, strict=True)
    ]
    return _table(("kind of event", "what"), rows)


def classifiers() -> str:
    """Return the tables of HTTP statuses and of the errors of each library."""
    heading = ("class", "if idempotent")
    statuses = [(_statuses(rule), rule.why, *_classes(rule.means)) for rule in STATUSES]
    tables = ["### HTTP statuses\n\n" + _table(("status", "why", *heading), statuses)]
    for name, rules in LIBRARIES.items():
        rows = [(_errors(rule), rule.when, *_classes(rule.means)) for rule in rules]
        tables.append(f"### `{name}_errors`\n\n" + _table(("error", "when", *heading), rows))
    return "\n".join(tables)


#: What makes each table, by the page and the name in its marks.
TABLES: Mapping[tuple[str, str], Callable[[], str]] = {
    ("monitoring.md", "metrics"): metrics,
    ("monitoring.md", "events"): events,
    ("errors.md", "classifiers"): classifiers,
}


def write_into(page: str, name: str, text: str) -> str:
    """Return the page with the text between its marks.

    Raises:
        ValueError: the page does not have the marks.
    """
    begin, end = f"<!-- begin {name}: python -m tests.tables -->\n", f"<!-- end {name} -->\n"
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"the page has no {begin.strip()} and {end.strip()}")
    return f"{before}{begin}\n{text}\n{end}{after}"


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heading)} |", "|---" * len(heading) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def _statuses(rule: StatusRule) -> str:
    if isinstance(rule.statuses, range):
        text = f"other {rule.statuses.start // 100}xx"
    else:
        text = ", ".join(map(str, rule.statuses))
    if rule.if_asked_to_wait:
        text += " that ask to wait"
    if rule.if_retry_after:
        text += " with `Retry-After`"
    if rule.if_of_a_cache:
        text += " with `Server: Varnish`"
    return text


def _errors(rule: Rule) -> str:
    module = "" if rule.module == "builtins" else f"{rule.module.removesuffix('.exceptions')}."
    return ", ".join(f"`{module}{error}`" for error in rule.names.split())


def _classes(means: object) -> tuple[str, str]:
    if not isinstance(means, Meaning):
        return ("not classified" if means is None else "as it says"), ""
    verdicts = [Finding(means).verdict(idempotent=i) for i in (False, True)]
    words = [v.outcome.name + (", but repeated" if v.safe_to_repeat else "") for v in verdicts]
    return words[0], words[1]


def main() -> None:
    """Write all tables into their pages."""
    for (name, table), make in TABLES.items():
        page = DOCS / name
        page.write_text(write_into(page.read_text(), table, make()))


if __name__ == "__main__":
    main()
