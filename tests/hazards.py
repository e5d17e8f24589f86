"""List the known ways to lose a message or to run it twice, and the tests that guard against them.

The mark ``@pytest.mark.hazard("H4")`` says against which hazard a test guards.
``python -m tests.hazards`` writes the page ``tests/hazards.md`` from these marks.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS / "hazards.md"

#: What goes wrong with stock Celery on SQS (0.x), or with a naive retry by visibility timeout (Hx).
HAZARDS: Mapping[str, str] = {
    "0.1": "One failed receive (a 5xx, a timeout, expired credentials) ends the worker.",
    "0.2": "After a broker error the worker connects again, but never asks for a message again.",
    "0.3": "When the consumer restarts, running tasks run a second time, and the worker never "
    "deletes their messages.",
    "H1": "A library's own retry publishes a copy, and the original is retried as well. So "
    "messages multiply.",
    "H2": "The headers of a hidden message never change, so the retry count in them stays 0.",
    "H3": "SQS counts receives, and not every receive is an attempt.",
    "H4": "Celery reports a hard time limit twice, and each pool does so in another order.",
    "H5": "Celery swallows an exception in a callback of the pool. The worker then receives one "
    "message less at a time, for ever.",
    "H6": "A retry loses its data when the pool's process pickles it for the main process.",
    "H7": "With early acknowledgement, the worker deletes the message before its task has run.",
    "H8": "Code that handles failures in Celery's place forgets revoked and cancelled tasks.",
    "H9": "After a crash, the process that would announce the retry is dead.",
    "H10": "If a task is due later than the visibility timeout, workers receive and run it again "
    "and again.",
    "H11": "To keep a message until it is due, the worker blocks its event loop, or deletes the "
    "message.",
    "H12": "When Celery acknowledges or rejects a message, it deletes the message or overwrites "
    "its delay.",
    "H13": "Once Celery has closed the channel, it can no longer delete the message through it.",
    "H14": "The worker does not renew visibility timeouts while a task or a shutdown keeps its "
    "event loop busy.",
    "H15": "The worker no longer renews visibility timeouts once a warm shutdown has begun.",
    "H16": "A late renewal overwrites the delay of a retry, or hides a message that was given "
    "back.",
    "H17": "The visibility timeout is that of the queue, not the one in Celery's settings. SQS "
    "also lets no worker hold a message for more than 12 hours.",
    "H18": "With boto3's defaults, calls that delete or hide a message can wait for minutes.",
    "H19": "A process that is forked while threads and clients exist shares their locks and "
    "connections.",
    "H20": "At `maxReceiveCount`, SQS moves the message without a reason. A caller who waits for "
    "the result waits for ever.",
    "H21": "On a FIFO queue, a hidden message holds up its message group.",
    "H22": "Hidden messages are in flight. With 120,000 in flight, SQS hands out no more messages.",
    "H23": "There is no message to hide if a task runs on another broker, eagerly, or as a "
    "function.",
    "H24": "The base class breaks other base classes, `SystemExit`, or Django's sending on commit.",
    "H25": "A chain does not go on, or a chord waits for ever, when one of its tasks is retried or "
    "given up.",
    "H26": "A message stays hidden for longer than its task's expiry allows.",
    "H27": "A revoked task runs.",
    "H28": "After a lost connection, the worker no longer renews the visibility timeouts of "
    "running tasks.",
}

#: Why the library cannot guard fully, or at all, against a hazard.
REASONS: Mapping[str, str] = {
    "H27": "SQS has no broadcast, so by default `revoke` reaches no worker. A worker that knows of "
    "a revoked task checks this before it starts or delays the task, but forgets it when it stops.",
}


@cache
def marks() -> Mapping[str, Sequence[tuple[Path, str]]]:
    """Return the file and the name of each marked test, by hazard."""
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
    """Return the text of the page."""
    lines = [
        "# Hazards",
        "",
        "How messages get lost, run twice or stay behind with stock Celery on SQS (0.1 to 0.3),",
        "and with naive retries by visibility timeout (H1 to H28). The last column names the tests",
        "that guard against each hazard, or says why the library cannot.",
        "",
        "`python -m tests.hazards` makes this page from the marks in the tests.",
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
