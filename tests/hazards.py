"""Which test guards against which known way to lose a message, or to run it twice.

A test says what it guards against by ``@pytest.mark.hazard("H4")``. ``python -m tests.hazards``
writes the page ``tests/hazards.md`` from these marks.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS / "hazards.md"

#: What goes wrong in stock Celery on SQS (0.x), or in a naive way to retry there (Hx).
HAZARDS: Mapping[str, str] = {
    "0.1": "One failed receive (a 5xx, a timeout, expired credentials) ends the worker.",
    "0.2": "After a broker error the worker is connected again, and never asks for a message.",
    "0.3": "When the consumer restarts, running tasks run a second time and are never deleted.",
    "H1": "Somebody's own retry has published a copy, and the original is kept as well: "
    "messages multiply.",
    "H2": "The headers of a message never change, so the count of retries stays at 0.",
    "H3": "SQS counts receives, and not every receive is an attempt.",
    "H4": "A hard time limit is reported twice, and in another order in each pool.",
    "H5": "An exception in a callback of the pool disappears, and with it a place in the prefetch "
    "window.",
    "H6": "What a retry carries is lost when it is pickled on its way from the pool's process.",
    "H7": "With early acknowledgement the message is deleted before its task has run.",
    "H8": "A failure is handled, but what Celery does besides is forgotten: revoked and cancelled "
    "tasks.",
    "H9": "After a crash nobody is left to announce the retry.",
    "H10": "A task that is due later than the visibility timeout is received, and run, again and "
    "again.",
    "H11": "Giving a message back until it is due blocks the event loop, or deletes it.",
    "H12": "Celery's ways to acknowledge and to reject delete the message, or overwrite its delay.",
    "H13": "Once the channel is closed, the message can no longer be deleted through it.",
    "H14": "Visibility is not renewed while a task, or a shutdown, keeps the event loop busy.",
    "H15": "Visibility is no longer renewed once a warm shutdown has begun.",
    "H16": "A renewal that comes after a backoff, or after a release, overwrites it.",
    "H17": "The visibility timeout is the queue's, not the one in the settings; and SQS ends every "
    "hold after 12 hours.",
    "H18": "Calls that settle messages wait for minutes, with the defaults of boto3.",
    "H19": "Processes forked while threads and clients exist share what they must not.",
    "H20": "At `maxReceiveCount` SQS moves the message silently: no reason, and whoever waits for "
    "the result waits for ever.",
    "H21": "On a FIFO queue a hidden message holds up its message group.",
    "H22": "Hidden messages are in flight, and at 120,000 of them SQS hands out no more.",
    "H23": "On other brokers, eagerly, or called as a function, there is no message to hide.",
    "H24": "The base class gets in the way of others, of `SystemExit`, or of Django's commit.",
    "H25": "Chains and chords are not continued, or wait for ever, when a part is retried or given "
    "up.",
    "H26": "A message backs off beyond the time at which its task expires.",
    "H27": "A revoked task runs.",
    "H28": "After a lost connection the hold on running tasks is gone.",
}

#: Why it cannot be ours, or not all of it.
REASONS: Mapping[str, str] = {
    "H27": "SQS has no broadcast, so by default `revoke` reaches no worker there, and what a "
    "worker knows of it ends with the worker. What it does know is looked at before a task is put "
    "off, and before it starts.",
}


@cache
def marks() -> Mapping[str, Sequence[tuple[Path, str]]]:
    """Find the marked tests: file and name of the function, by hazard."""
    found: dict[str, list[tuple[Path, str]]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                for hazard in _hazards_of(node):
                    found[hazard].append((path, node.name))
    return found


def _hazards_of(function: ast.FunctionDef) -> Iterator[str]:
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.hazard":
            yield from (ast.literal_eval(argument) for argument in decorator.args)


def render() -> str:
    """Make the page."""
    lines = [
        "# Hazards",
        "",
        "How messages get lost, run twice or stay behind: with stock Celery on SQS (0.1 to 0.3),",
        "and where retries by visibility timeout are done naively (H1 to H28). Each has the tests",
        "that guard against it, or the reason why the library cannot.",
        "",
        "This page is made from the marks in the tests, by `python -m tests.hazards`.",
        "",
        "| | what goes wrong | guarded by |",
        "|---|---|---|",
    ]
    found = marks()
    for hazard, text in HAZARDS.items():
        guards = [
            f"[`{name}`]({path.relative_to(TESTS).as_posix()})"
            for path, name in sorted(found.get(hazard, ()))
        ]
        reason = [f"*{REASONS[hazard]}*"] if hazard in REASONS else []
        lines.append(f"| {hazard} | {text} | {'<br>'.join([*reason, *guards])} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    PAGE.write_text(render())
