"""The documentation is true: its code runs, its links exist, its tables match the source."""

from __future__ import annotations

import ast
import configparser
import json
import logging
import os
import re
import shlex
import smtplib
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from botocore import xform_name
from botocore.session import get_session
from celery import Celery, signals
from celery.bin.celery import celery as celery_command
from celery.exceptions import ImproperlyConfigured
from markdown_it import MarkdownIt
from markdown_it.token import Token

import celery_sqs_backoff
from celery_sqs_backoff.observe import events
from celery_sqs_backoff.retry.budget import GiveUpReason
from celery_sqs_backoff.sqs.dead_letter import DeadLetterRecord, with_record
from celery_sqs_backoff.sqs.errors import Operation
from celery_sqs_backoff.testing import on_local_sqs, running_worker
from tests.support.processes import eventually
from tests.tables import TABLES, write_into

ROOT = Path(__file__).parents[2]
PACKAGE = Path(celery_sqs_backoff.__path__[0])
DOCS = sorted((ROOT / "docs").rglob("*.md"))
OUTSIDE = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "example_project/README.md"),
    *("tests/README.md", "tests/field-stories.md", "tests/hazards.md"),
)
PAGES = [*(ROOT / name for name in OUTSIDE), *DOCS]

#: Pages whose commands tests/acceptance/test_quickstart.py runs as they are written.
TYPED_IN = ("quickstart.md", "django.md")

SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")


# Reading a page


@dataclass(frozen=True)
class Block:
    """A fenced block of code. Its first line of code is line ``line`` of the page, from 0."""

    language: str
    file: str
    line: int
    code: str


def tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text())


def blocks(page: Path, language: str) -> list[Block]:
    found = []
    for token in tokens(page):
        if token.type == "fence":
            assert token.map is not None
            words = [*token.info.split(), "", ""]
            found.append(Block(words[0], words[1], token.map[0] + 1, token.content))
    return [block for block in found if block.language == language]


def tables(page: Path) -> Iterator[list[list[str]]]:
    """Yield each table of a page as rows of cells. The first row is the heading."""
    rows: list[list[str]] = []
    cell = False
    for token in tokens(page):
        if token.type == "table_open":
            rows = []
        elif token.type == "tr_open":
            rows.append([])
        elif token.type == "inline" and cell:
            rows[-1].append(token.content)
        elif token.type == "table_close":
            yield rows
        cell = token.type in ("th_open", "td_open")


def table(name: str, *, heading: str) -> list[list[str]]:
    """Return the rows of the only table of a page whose first column has this heading."""
    [rows] = [rows for rows in tables(ROOT / name) if rows[0][0] == heading]
    return rows[1:]


def code_spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def by_name(pages: Iterable[Path]) -> Any:
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


# Code

#: A program that runs a page's code and binds its tasks. It may connect to this machine only.
RUN = """
import socket, sys
connect = socket.socket.connect
def connect_to_this_machine(self, address):
    if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1"):
        raise AssertionError(f"the documentation uses the network: {address}")
    return connect(self, address)
socket.socket.connect = connect_to_this_machine
names = {"__name__": "__main__"}
exec(compile(sys.stdin.read(), sys.argv[1], "exec"), names)
for app in [value for value in names.values() if type(value).__name__ == "Celery"]:
    app.finalize()
    [task.name for task in app.tasks.values()]
"""


def python_of(page: Path) -> str:
    """Return a page's code at the same line numbers, so that a traceback names the page's lines."""
    lines: list[str] = []
    for block in blocks(page, "python"):
        if not block.file:
            lines += [""] * (block.line - len(lines)) + block.code.splitlines()
    return "\n".join(lines)


@pytest.fixture
def a_dead_letter(sqs_queue_factory, sqs_client):
    queue = sqs_queue_factory(name="mail")
    assert queue.dlq is not None
    record = DeadLetterRecord(
        task="shop.send_email",
        id="7",
        reason=GiveUpReason.RETRY_FOR.value,
        outcome="RETRYABLE",
        exception_message="the provider is down",
        attempts=80,
        first_received_at=0.0,
        failed_at=1.0,
        origin=queue.arn,
        worker="test",
    )
    sqs_client.send_message(
        QueueUrl=queue.dlq.url,
        MessageBody="{}",
        MessageAttributes=with_record("{}", {}, record),
    )


@by_name([page for page in PAGES if blocks(page, "python")])
def test_code_of_page(page, sqs_server, a_dead_letter, tmp_path):
    """The Python code of each page runs.

    Each page has its own process, so that a Celery app that it makes current ends with it.
    """
    home = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "CELERY_"))}
    here = {
        "AWS_ENDPOINT_URL": sqs_server,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(page)],
        input=python_of(page),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=home | here,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr


def test_tests_of_pages(pytester):
    """The example tests in the pages pass."""
    pages = [page for page in PAGES if page.name not in TYPED_IN]
    files = {
        block.file: block.code for page in pages for block in blocks(page, "python") if block.file
    }
    assert any(name.startswith("test_") for name in files)
    for name, code in files.items():
        pytester.path.joinpath(name).write_text(code)
    expected = sum(len(re.findall(r"^def test_", code, re.M)) for code in files.values())
    result = pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider", timeout=240)
    result.assert_outcomes(passed=expected)


def test_language_of_block():
    """Each fenced block names a known language."""
    known = {"python", "console", "json", "yaml", "hcl", "mermaid"}
    known |= {"text"}  # what a command prints
    known |= {"{toctree}", "{eval-rst}", "{command-help}"}  # what only the site shows
    for page in PAGES:
        infos = [token.info for token in tokens(page) if token.type == "fence"]
        assert {info.partition(" ")[0] for info in infos} <= known, page


def test_json_and_yaml():
    """The JSON and YAML of the pages can be parsed."""
    for page in PAGES:
        for block in blocks(page, "json"):
            json.loads(block.code)
        for block in blocks(page, "yaml"):
            assert [*yaml.safe_load_all(block.code)]


# The README's example, and the IAM policy that it needs


def test_readme_mail(proxy, queue, monkeypatch):
    """The README's example sends its mail although the mail server refuses the first connection.

    The worker makes only those calls to SQS that the documented IAM policy allows.
    """
    mails = {"__name__": "mails"}
    exec(compile(python_of(ROOT / "README.md"), str(ROOT / "README.md"), "exec"), mails)
    connections = []
    sent = []
    retried = []

    class Server:
        def __enter__(self):
            return self

        def __exit__(self, *exc):
            pass

        def sendmail(self, *mail):
            sent.append(mail)

    real = smtplib.SMTP

    def connect(host, timeout):
        connections.append(1)
        return Server() if len(connections) > 1 else real("127.0.0.1", closed_port(), timeout=1)

    def note(reason, **_):
        retried.append(reason)

    def leave_logging_as_it_is(**_):
        """Keep the worker from changing the level of the root logger, which other tests use."""

    monkeypatch.setattr(smtplib, "SMTP", connect)
    signals.task_retry.connect(note)
    signals.setup_logging.connect(leave_logging_as_it_is)
    with on_local_sqs(mails["app"], proxy.endpoint, queue) as app:
        app.finalize()
        with running_worker(app):
            mails["send_email"].delay("customer@example.com", "Hello")
            eventually(lambda: sent, timeout=15)
        asked = {action for action, count in proxy.counts().items() if count.calls}
    assert sent == [("shop@example.com", "customer@example.com", "Hello")]
    assert len(connections) == 2
    assert len(retried) == 1
    assert {"ReceiveMessage", "SendMessage"} <= asked
    assert {iam_action(action) for action in asked} <= worker_policy()


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# Links


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    found: list[str] = []
    stream = tokens(page)
    for opening, inline in pairwise(stream):
        if opening.type == "heading_open":
            text = "".join(child.content for child in inline.children or ())
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return set(found)


def links(page: Path) -> list[str]:
    return [
        str(child.attrs["href"])
        for token in tokens(page)
        for child in token.children or ()
        if child.type == "link_open"
    ]


def target_of(page: Path, path: str) -> Path | None:
    """Return the file that a link leads to, or None if it leads to another site."""
    if "://" in path:
        return None
    return (page.parent / path).resolve() if path else page


def test_links():
    """Each link leads to a file that exists. If it names a heading, that exists too."""
    broken = []
    for page in PAGES:
        for link in links(page):
            path, _, anchor = link.partition("#")
            target = target_of(page, path)
            if target is not None and not (
                target.exists() and (not anchor or anchor in anchors(target))
            ):
                broken.append(f"{page.name}: {link}")
    assert broken == []


def test_links_of_site():
    """A page in ``docs/`` links to other pages in ``docs/``, or to full URLs.

    The published site has no other files of the repository.
    """
    for page in DOCS:
        for link in links(page):
            target = target_of(page, link.partition("#")[0])
            assert "://" in link or target in DOCS, f"{page.name}: {link}"


def test_placeholder_links():
    """No link leads to a placeholder. Only code may name a domain that does not exist."""
    for page in PAGES:
        for link in links(page):
            assert not re.search(r"//([\w-]+\.)*(example\.(org|com|net)|localhost)\b", link), link


def test_llms_txt():
    """``llms.txt`` links to each page except the index."""
    targets = [target_of(ROOT / "llms.txt", link) for link in links(ROOT / "llms.txt")]
    assert sorted(map(str, targets)) == sorted(str(page) for page in DOCS if page.stem != "index")


def test_public_names():
    """``docs/api.md`` documents each public name, by itself or with its whole module."""
    page = ROOT / "docs/api.md"
    text = "".join(block.code for block in blocks(page, "{eval-rst}"))
    listed = {
        name.rpartition(".")[2] for name in re.findall(r"^ *\.\. auto\w+:: (\S+)$", text, re.M)
    }
    wholly = re.findall(r"^\.\. automodule:: (\S+)$", text, re.M)
    for token in tokens(page):
        if token.type == "inline" and re.fullmatch(r"`celery_sqs_backoff[\w.]*`", token.content):
            module = import_module(token.content.strip("`"))
            assert module.__name__ in wholly or set(module.__all__) <= listed, module


def test_command_help():
    """``docs/commands.md`` shows the help of each command."""
    text = (ROOT / "docs/commands.md").read_text()
    shown = re.findall(r"^```\{command-help\} (\S+)$", text, re.M)
    entries = SETUP["options.entry_points"]["celery.commands"].split("\n")
    assert sorted(shown) == sorted(line.partition(" =")[0] for line in entries if line)


@pytest.mark.timeout(300)
@pytest.mark.skipif(
    find_spec("furo") is None and "CI" not in os.environ, reason="the extra docs is not installed"
)
def test_site(tmp_path):
    """Sphinx builds the site without a warning.

    It also warns if a page refers to a Python name that does not exist.
    """
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-n", "-W", "--keep-going", "-q", "docs", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_contents():
    """The table of contents in ``docs/index.md`` names each page."""
    index = ROOT / "docs/index.md"
    lines = [line for block in blocks(index, "{toctree}") for line in block.code.splitlines()]
    named = [line for line in lines if line and not line.startswith(":")]
    assert sorted([*named, "index"]) == sorted(page.stem for page in DOCS)


# Commands


def commands() -> Iterator[tuple[str, list[str]]]:
    for page in PAGES:
        for block in blocks(page, "console") if page.name not in TYPED_IN else ():
            for line in block.code.splitlines():
                assert line.startswith("$ "), f"{page.name}: {line}"
                yield line[2:], shlex.split(line[2:])


def ids(case: object) -> str:
    return case if isinstance(case, str) else ""


@pytest.mark.parametrize(("line", "words"), [*dict(commands()).items()], ids=ids)
def test_command(line, words):
    """Each command that a page shows exists, with the options or files that it names."""
    program, arguments = Path(words[0]).name, words[1:]
    check = {
        "make": check_make,
        "celery": check_celery,
        "pip": check_pip,
        "python": check_python,
        "tox": check_tox,
        "aws": check_aws,
    }[program]
    check(arguments)


def check_make(targets: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    variables = {word.partition("=")[0] for word in targets if "=" in word}
    assert variables <= set(re.findall(r"^(\w+) \?=", makefile, re.M))
    targets = [word for word in targets if "=" not in word]
    assert targets
    assert set(targets) <= set(re.findall(r"^([\w-]+):", makefile, re.M))


def check_celery(arguments: list[str]) -> None:
    assert arguments[0] == "-A"
    command = celery_command.commands[arguments[2]]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in arguments[3:] if word.startswith("-")} <= known


def check_pip(arguments: list[str]) -> None:
    install, requirement = arguments
    name, _, extra = requirement.rstrip("]").partition("[")
    assert (install, name) == ("install", SETUP["metadata"]["name"])
    assert not extra or extra in SETUP["options.extras_require"]


def check_python(arguments: list[str]) -> None:
    assert arguments[0] == "-m"
    assert arguments[1] == "pytest" or find_spec(arguments[1])
    for word in arguments[2:]:
        assert not word.startswith("tests/") or (ROOT / word).exists(), word


def check_tox(arguments: list[str]) -> None:
    assert arguments[0] == "-e"
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    known = tox["tox"]["env_list"].split()
    patterns = [re.sub(r"\{([^}]*)\}", lambda m: f"({m[1].replace(',', '|')})", n) for n in known]
    assert any(re.fullmatch(pattern, arguments[1]) for pattern in patterns)


def check_aws(arguments: list[str]) -> None:
    assert arguments[0] == "sqs"
    assert arguments[1].replace("-", "_") in OPERATIONS


# Tables


def known_settings() -> set[str]:
    """Return the valid keys of ``app.conf.sqs_backoff``. The error about another key lists them."""
    app = Celery("settings", set_as_current=False)
    app.conf.sqs_backoff = {"no such": None}

    @app.task(base=celery_sqs_backoff.SQSBackoffTask)
    def send() -> None: ...

    with pytest.raises(ImproperlyConfigured, match="expected") as refused:
        app.finalize()
    return set(str(refused.value).partition("expected ")[2].split(", "))


def test_options_table():
    """``docs/options.md`` shows each app-wide setting, and each task option with its default."""
    rows = table("docs/options.md", heading="option")
    shown = {code_spans(row[0])[0]: code_spans(row[1])[0] for row in rows}
    names = vars(celery_sqs_backoff) | {"timedelta": timedelta}
    for name, code in shown.items():
        assert eval(code, names) == getattr(celery_sqs_backoff.SQSBackoffTask, name), name
    settings = {code_spans(row[0])[0] for row in table("docs/options.md", heading="setting")}
    assert {*shown, *settings} - {"guard"} == known_settings()  # only a task can have a guard


def test_named_settings():
    """Each app-wide setting that a page or the source names exists."""
    texts = [path.read_text() for path in (*PAGES, *PACKAGE.rglob("*.py"))]
    named = {
        name for text in texts for name in re.findall(r"""sqs_backoff\[["']([a-z_]+)["']\]""", text)
    }
    assert {"store", "heartbeat"} <= named <= known_settings()


def log_events() -> set[tuple[str, str]]:
    """Return the name and level of each log event in the package's source."""
    found = {
        (f"sqs_backoff.{kind.name}", logging.getLevelName(kind.line[0]))
        for kind in vars(events).values()
        if isinstance(kind, type) and getattr(kind, "line", None)
    }
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id="logger"), attr=level),
                    args=[ast.Constant(value=str(text)), *_],
                ) if text.startswith("sqs_backoff."):
                    event = re.match(r"[\w.]+", text)
                    assert event
                    found.add((event[0], "ERROR" if level == "exception" else level.upper()))
    return found


def test_log_events():
    """``docs/log-events.md`` shows each log event with its level."""
    shown = {
        (event, rows[0][0])
        for rows in tables(ROOT / "docs/log-events.md")
        for row in rows[1:]
        for event in code_spans(row[0])
    }
    assert shown == log_events()


def test_django_checks():
    """``docs/doctor-rules.md`` lists each system check that we add to Django."""
    source = "".join(path.read_text() for path in (PACKAGE / "contrib/django").rglob("*.py"))
    ids = set(re.findall(r"\b([EWI]\d{3})\"", source))
    shown = {code_spans(row[0])[0] for row in table("docs/doctor-rules.md", heading="check")}
    assert shown == ids


def test_dead_letter_tables():
    """The pages list each field of a dead letter's record, and each reason to give up."""
    shown = [
        name
        for row in table("docs/dead-letter-record.md", heading="field")
        for name in code_spans(row[0])
    ]
    assert sorted(shown) == sorted(field.name for field in fields(DeadLetterRecord))
    reasons = [
        name
        for row in table("docs/dead-letters.md", heading="`reason`")
        for name in code_spans(row[0])
    ]
    assert sorted(reasons) == sorted(reason.value for reason in GiveUpReason)


#: SQS's name of each operation, by the name of the method of a boto3 client.
OPERATIONS = {
    xform_name(name): name for name in get_session().get_service_model("sqs").operation_names
}


def iam_action(operation: str) -> str:
    """Return the IAM action that an operation needs. A batch needs the same as a single call."""
    return f"sqs:{operation.removesuffix('Batch')}"


def actions_called_by(files: Iterable[Path]) -> set[str]:
    """Return the IAM actions of the operations that source files name.

    A file names an operation as a method of a boto3 client, or as a member of ``Operation``.
    """
    found = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in OPERATIONS:
                found.add(iam_action(OPERATIONS[node.attr]))
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "Operation":
                found.add(iam_action(Operation[node.attr].value))
    return found


def worker_policy() -> set[str]:
    return policy(0)


def policy(number: int) -> set[str]:
    block = blocks(ROOT / "docs/queues.md", "json")[number]
    return {
        action
        for statement in json.loads(block.code)["Statement"]
        for action in statement["Action"]
    }


def shown_actions(heading_row: int) -> set[str]:
    found = [rows for rows in tables(ROOT / "docs/queues.md") if rows[0][0] == "action"]
    rows = found[heading_row][1:]
    return {name for row in rows for name in code_spans(row[0])}


def test_iam_actions():
    """``docs/queues.md`` shows the IAM actions that workers and redrives need, and no others."""
    redrive = set((PACKAGE / "redrive").rglob("*.py"))
    finder = PACKAGE / "sqs" / "find_queue.py"  # used by commands only
    worker = set(PACKAGE.rglob("*.py")) - redrive - {PACKAGE / "testing.py", finder}
    assert actions_called_by(worker) == worker_policy() == shown_actions(0)
    redrive |= {PACKAGE / "sqs" / "calls.py", finder}
    assert actions_called_by(redrive) == shown_actions(1)


def test_terraform():
    """The Terraform example grants a worker the same actions as the JSON policy on the page."""
    import hcl2

    page = ROOT / "docs/queues.md"
    queues, rights = [hcl2.loads(block.code) for block in blocks(page, "hcl")]
    [document] = rights["data"]
    [worker] = document['"aws_iam_policy_document"'].values()
    granted = [
        {action.strip('"') for action in statement["actions"]} for statement in worker["statement"]
    ]
    policies = json.loads(blocks(page, "json")[0].code)["Statement"]
    assert granted == [set(statement["Action"]) for statement in policies]
    kinds = {kind.strip('"') for resource in queues["resource"] for kind in resource}
    assert kinds == {"aws_sqs_queue", "aws_sqs_queue_redrive_allow_policy"}


#: The stories of users whose wishes this version fulfils.
EXISTING_STORIES = (
    *("M1", "M2", "M3", "M4", "M5", "B1", "B2", "B3", "B4", "B5"),
    *("R1", "R2", "R3", "R5", "Q1", "Q2", "Q3", "Q4"),
)


def test_field_stories():
    """``tests/field-stories.md`` has each story above, and no story twice."""
    shown = [row[0] for rows in tables(ROOT / "tests/field-stories.md") for row in rows[1:]]
    assert len(set(shown)) == len(shown)
    assert set(EXISTING_STORIES) <= set(shown)


@pytest.mark.parametrize(("page", "table"), TABLES)
def test_generated_tables(page, table):
    """The tables that ``python -m tests.tables`` writes from the source are up to date."""
    text = (ROOT / "docs" / page).read_text()
    assert write_into(text, table, TABLES[page, table]()) == text
