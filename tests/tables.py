"""Make the tables and diagrams in the documentation that come from the code.

``python -m tests.tables`` writes each of them between its marks in a page. The marks are HTML
comments, such as ``<!-- end metrics -->``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from celery_sqs_backoff.classifiers import botocore, httpx, requests, sdk, smtplib, urllib
from celery_sqs_backoff.classifiers.answers import STATUSES, StatusRule
from celery_sqs_backoff.classifiers.exchange import Diagnosis, ErrorRule, Meaning
from celery_sqs_backoff.doctor import RULES
from celery_sqs_backoff.observe.metrics import INSTRUMENTS
from celery_sqs_backoff.provider import gate
from celery_sqs_backoff.retry import decision
from celery_sqs_backoff.retry.outcomes import Outcome
from celery_sqs_backoff.worker.lease import TRANSITIONS, State

DOCS = Path(__file__).parents[1] / "docs"

#: The rules of each library, by the name of its classifier.
LIBRARIES: Mapping[str, tuple[ErrorRule, ...]] = {
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
            f"`sqs_backoff_{one.name}`",
            "counter" if one.event else "gauge",
            ", ".join(f"`{label}`" for label in one.labels.split()),
            one.text,
        )
        for one in INSTRUMENTS
    ]
    return _table(("metric", "kind", "labels", "what"), rows)


def classifiers() -> str:
    """Return the tables of HTTP statuses and of the errors of each library."""
    statuses = [(_statuses(rule), rule.why, _outcome(rule.means)) for rule in STATUSES]
    tables = ["## HTTP statuses\n\n" + _table(("status", "why", "outcome"), statuses)]
    for name, rules in LIBRARIES.items():
        rows = [(_errors(rule), rule.when, _outcome(rule.means)) for rule in rules]
        tables.append(f"## `{name}_errors`\n\n" + _table(("error", "when", "outcome"), rows))
    return "\n".join(tables)


def provider_states() -> str:
    """Return the diagram of a provider's states, from the table in the docstring of its gate."""
    rows = read_table(gate.__doc__, heading="state")
    return _diagram([(_state(a), _label(event), _state(b)) for a, event, b in rows])


def message_states() -> str:
    """Return the diagram of the states of a message in a worker, from its table of transitions."""
    edges = [("[*]", "receive", State.HELD.name)]
    for state, leads_to in TRANSITIONS.items():
        for target, why in leads_to.items():
            edges.append((state.name, _label(why), "[*]" if target is None else target.name))
    return _diagram(edges)


#: What a run can do to its message. The keys are words in the table in the docstring of
#: ``decision``. The values are names in the diagram.
_ENDS = {"delete": "deleted", "hide": "hidden", "dead letter": "dead_letter", "give": "given_back"}


def run_ends() -> str:
    """Return the diagram of how a run ends for its message, from the docstring of ``decision``."""
    rows = read_table(decision.__doc__, heading="how the run ended")
    cells_of = {run: cells for run, *cells in rows}
    lead_to: dict[str, list[str]] = {end: [] for end in _ENDS}
    for run, cells in cells_of.items():
        as_another = re.match(r"as ([a-z ]+)", cells[0])
        for cell in cells_of[as_another[1]] if as_another else cells:
            for end, runs in lead_to.items():
                if re.search(rf"\b{end}\b", cell.partition(":")[0]) and run not in runs:
                    runs.append(run)
    return _diagram(
        [
            ("[*]", "receive", "running"),
            *(("running", ", ".join(lead_to[end]), name) for end, name in _ENDS.items()),
            *((name, "", "[*]") for name in _ENDS.values()),
        ]
    )


def rules() -> str:
    """Return the table of the doctor's rules."""
    return _table(("rule", "fault"), [(f"`{rule.id}`", rule.title) for rule in RULES])


#: The function that makes each table, by the page and by the name in its marks.
TABLES: Mapping[tuple[str, str], Callable[[], str]] = {
    ("metrics.md", "metrics"): metrics,
    ("classifiers.md", "classifiers"): classifiers,
    ("providers.md", "states"): provider_states,
    ("how-it-works.md", "messages"): message_states,
    ("how-it-works.md", "runs"): run_ends,
    ("doctor-rules.md", "rules"): rules,
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


def read_table(text: str | None, *, heading: str) -> list[list[str]]:
    """Return the rows of the table in a docstring that has this heading over its first column.

    Raises:
        LookupError: the docstring has no such table. Perhaps the table is now in another module.
    """
    lines = inspect.cleandoc(text or "").splitlines()
    for at, line in enumerate(lines):
        if line.startswith(f"| {heading} |"):
            rows = takewhile(lambda row: row.startswith("|"), lines[at + 2 :])
            return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
        if line.startswith(heading) and set(lines[at + 1]) == {"=", " "}:
            return _rest_rows(lines[at + 1], lines[at + 2 :])
    raise LookupError(f"no table with the heading {heading!r}")


def _rest_rows(ruler: str, lines: Sequence[str]) -> list[list[str]]:
    """Return the rows of a simple reST table. A line with an empty first cell continues a row."""
    spans = [slice(match.start(), match.end()) for match in re.finditer("=+", ruler)]
    spans[-1] = slice(spans[-1].start, None)
    rows: list[list[str]] = []
    for line in takewhile(lambda line: line != ruler, lines):
        cells = [line[span].strip() for span in spans]
        if cells[0]:
            rows.append(cells)
        else:
            rows[-1] = [f"{old} {new}".strip() for old, new in zip(rows[-1], cells, strict=True)]
    return rows


def _diagram(edges: Sequence[tuple[str, str, str]]) -> str:
    lines = [f"    {a} --> {b}{f' : {label}' if label else ''}" for a, label, b in edges]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"]) + "\n"


def _label(text: str) -> str:
    """Return the text without characters that have a meaning in a diagram."""
    return text.replace("`", "").replace(":", " -").replace(";", ",")


#: The words that users see for the states of a provider's gate, which is a circuit breaker.
_STATES = {"closed": "well", "open": "paused"}


def _state(text: str) -> str:
    name = re.split(r"\W", text, maxsplit=1)[0].lower()
    return _STATES.get(name, name)


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heading)} |", "|---" * len(heading) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def _statuses(rule: StatusRule) -> str:
    if isinstance(rule.statuses, range):
        text = f"other {rule.statuses.start // 100}xx"
    else:
        text = ", ".join(map(str, rule.statuses))
    return f"{text} {rule.only}".strip()


def _errors(rule: ErrorRule) -> str:
    module = "" if rule.module == "builtins" else f"{rule.module.removesuffix('.exceptions')}."
    return ", ".join(f"`{module}{error}`" for error in rule.names.split())


def _outcome(means: object) -> str:
    if not isinstance(means, Meaning):
        return "not classified" if means is None else "as it says"
    verdict = Diagnosis(means).verdict(idempotent=True)
    is_in_doubt = verdict.outcome is Outcome.UNKNOWN
    never = ", never repeated" if is_in_doubt and not verdict.safe_to_repeat else ""
    return verdict.outcome.name + never


def main() -> None:
    """Write all tables into their pages."""
    for (name, table), make in TABLES.items():
        page = DOCS / name
        page.write_text(write_into(page.read_text(), table, make()))


if __name__ == "__main__":
    main()
