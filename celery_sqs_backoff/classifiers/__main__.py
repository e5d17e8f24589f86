"""Print the tables of errors, or write them into a page of documentation.

``python -m celery_sqs_backoff.classifiers`` prints; with a file's name, the text between the two
marks in it is replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from . import aiohttp, botocore, httpx, requests, sdk, smtplib, urllib
from .answers import STATUSES
from .exchange import Finding, Meaning, Rule

__all__ = ["LIBRARIES", "tables", "written_into"]

LIBRARIES: dict[str, tuple[Rule, ...]] = {
    "requests": requests.RULES,
    "httpx": httpx.RULES,
    "urllib": urllib.RULES,
    "aiohttp": aiohttp.RULES,
    "botocore": botocore.RULES,
    "smtplib": smtplib.RULES,
    "sdk": sdk.RULES,
}

_BEGIN = "<!-- begin: python -m celery_sqs_backoff.classifiers docs/classifiers.md -->\n"
_END = "<!-- end -->\n"


def tables() -> str:
    """All tables, in Markdown."""
    return "\n".join((*_statuses(), *(line for name in LIBRARIES for line in _library(name))))


def written_into(page: str) -> str:
    """The page with the tables between its marks. Raises ``ValueError`` if it has no marks."""
    if _BEGIN not in page or _END not in page:
        raise ValueError(f"the page has no {_BEGIN.strip()} and {_END.strip()}")
    before, _, rest = page.partition(_BEGIN)
    return f"{before}{_BEGIN}\n{tables()}\n{_END}{rest.partition(_END)[2]}"


def _statuses() -> Iterator[str]:
    yield "### HTTP statuses\n"
    yield "| status | why | class | if idempotent |"
    yield "|---|---|---|---|"
    for rule in STATUSES:
        statuses = _numbers(rule.statuses)
        if rule.if_asked_to_wait:
            statuses += " that ask to wait"
        if rule.if_retry_after:
            statuses += " with `Retry-After`"
        if rule.if_of_a_cache:
            statuses += " with `Server: Varnish`"
        yield f"| {statuses} | {rule.why} | {_classes(rule.means)} |"
    yield ""


def _numbers(statuses: Collection[int]) -> str:
    if isinstance(statuses, range):
        return f"other {statuses.start // 100}xx"
    return ", ".join(map(str, statuses))


def _library(name: str) -> Iterator[str]:
    yield f"### `{name}_errors`\n"
    yield "| error | when | class | if idempotent |"
    yield "|---|---|---|---|"
    for rule in LIBRARIES[name]:
        module = "" if rule.module == "builtins" else f"{rule.module.removesuffix('.exceptions')}."
        errors = ", ".join(f"`{module}{error}`" for error in rule.names.split())
        yield f"| {errors} | {rule.when} | {_classes(rule.means)} |"
    yield ""


def _classes(means: object) -> str:
    if isinstance(means, Meaning):
        verdicts = [Finding(means).verdict(idempotent=i) for i in (False, True)]
        repeated = [", but repeated" if v.safe_to_repeat else "" for v in verdicts]
        return " | ".join(v.outcome.name + r for v, r in zip(verdicts, repeated, strict=True))
    return "not classified |" if means is None else "as it says |"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        path = Path(sys.argv[1])
        path.write_text(written_into(path.read_text()))
    else:
        sys.stdout.write(tables())
