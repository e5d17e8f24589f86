"""Two runs of the same tests compared, and which of the differences are known."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

#: The list of known differences.
KNOWN = Path(__file__).with_name("differences.txt")

#: What counts when several phases of a test are reported, worst first.
_WORST_FIRST = ("failed", "xfailed", "skipped", "passed")

_COMMENT = "#"


@dataclass(frozen=True)
class KnownDifference:
    """Tests that pass on stock and fail with our class, and why that is right."""

    versions: frozenset[str]
    pattern: str
    reason: str

    def covers(self, test: str, version: str) -> bool:
        """Return whether this is the reason of a difference."""
        return version in self.versions and fnmatchcase(test, self.pattern)


@dataclass(frozen=True)
class Comparison:
    """The differences between stock and ours."""

    passed: int
    #: Fail on both: they test something that is not there (a service, a package).
    failed_on_both: int
    known: Mapping[str, KnownDifference]
    new: tuple[str, ...]
    #: Known differences that did not show: to be taken off the list.
    gone: tuple[KnownDifference, ...]


def compare(
    stock: Mapping[str, str],
    ours: Mapping[str, str],
    *,
    known: Iterable[KnownDifference],
    version: str,
) -> Comparison:
    """Compare the outcomes of the same tests.

    Args:
        stock: outcome by test, with Celery's own task class.
        ours: the same with ours. A test that is missing here has failed: its process ended.
        known: the differences that are known, whatever the version.
        version: of Celery, as ``5.7``.
    """
    on_this_version = [each for each in known if version in each.versions]
    different = [
        test
        for test, outcome in stock.items()
        if outcome == "passed" and ours.get(test, "failed") != "passed"
    ]
    reasons = {
        test: each for test in different for each in on_this_version if each.covers(test, version)
    }
    return Comparison(
        passed=sum(ours.get(test) == outcome == "passed" for test, outcome in stock.items()),
        failed_on_both=sum(
            outcome == "failed" == ours.get(test) for test, outcome in stock.items()
        ),
        known=reasons,
        new=tuple(test for test in different if test not in reasons),
        gone=tuple(
            each
            for each in on_this_version
            if each not in reasons.values() and any(each.covers(test, version) for test in stock)
        ),
    )


def read_outcomes(path: Path) -> dict[str, str]:
    """Outcome by test, from the lines that the plugin writes."""
    found: dict[str, str] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        test, outcome = json.loads(line)
        found[test] = min(outcome, found.get(test, outcome), key=_WORST_FIRST.index)
    return found


def read_known(path: Path = KNOWN) -> list[KnownDifference]:
    """Read the list of known differences.

    Each line has ``versions | test, with * for anything | reason``.

    Raises:
        ValueError: a line is not like this.
    """
    found = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip() or line.startswith(_COMMENT):
            continue
        versions, pattern, reason = [part.strip() for part in (line.split(" | ") + [""] * 3)[:3]]
        if not reason:
            raise ValueError(
                f"{path.name}:{number}: expected 'versions | test | reason', got {line!r}"
            )
        # Brackets are part of test ids, not a set of characters.
        escaped = pattern.replace("[", "[[]")
        found.append(KnownDifference(frozenset(versions.split()), escaped, reason))
    return found
