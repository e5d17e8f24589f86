"""Compare two runs of the same tests, and tell known differences from new ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

#: The list of known differences.
KNOWN = Path(__file__).with_name("differences.txt")

#: A test can have several outcomes, as pytest reports each phase of it. The worst of them counts.
_WORST_FIRST = ("failed", "xfailed", "skipped", "passed")

_COMMENT = "#"


@dataclass(frozen=True)
class KnownDifference:
    """Tests that pass with stock tasks and fail with our class, and why that is right."""

    versions: frozenset[str]
    pattern: str
    reason: str

    def covers(self, test: str, version: str) -> bool:
        """Return whether this explains why a test fails with our class on a version of Celery."""
        return version in self.versions and fnmatchcase(test, self.pattern)


@dataclass(frozen=True)
class Comparison:
    """The differences between the run with stock tasks and the run with our task class."""

    passed: int
    #: Tests that fail in both runs. They need something that is missing: a service or a package.
    failed_on_both: int
    known: Mapping[str, KnownDifference]
    new: tuple[str, ...]
    #: Known differences that these runs did not have. Somebody can remove them from the list.
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
        stock: the outcome of each test with Celery's own task class.
        ours: the outcome of each test with our class. A missing test counts as failed, because the
            process ended before its report.
        known: the known differences of all versions.
        version: the version of Celery, such as ``5.7``.
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
    """Return the outcome of each test, from the file that the plugin has written."""
    found: dict[str, str] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        test, outcome = json.loads(line)
        found[test] = min(outcome, found.get(test, outcome), key=_WORST_FIRST.index)
    return found


def read_known(path: Path = KNOWN) -> list[KnownDifference]:
    """Read the list of known differences.

    Each line has ``versions | test, with * for anything | reason``.

    Raises:
        ValueError: a line does not have these three parts.
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
        # A bracket is a part of a test's ID. Without the escape it would begin a set of characters.
        escaped = pattern.replace("[", "[[]")
        found.append(KnownDifference(frozenset(versions.split()), escaped, reason))
    return found
