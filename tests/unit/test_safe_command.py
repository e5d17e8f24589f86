"""``celery sqs-safe`` shows and deletes the records of guards, locks, steps and workflows.

To free a record is to delete it.
"""

from __future__ import annotations

import json

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result

from celery_sqs_backoff import Guard, NonRetryable, WorkflowTask
from celery_sqs_backoff.commands import safe
from celery_sqs_backoff.safe import Compensated, StoreUnavailable
from celery_sqs_backoff.safe.document import CLOSING, Document
from celery_sqs_backoff.safe.lock import Lock
from celery_sqs_backoff.store.memory import MemoryStore
from celery_sqs_backoff.store.settings import records_of

from .safe_app import bare_app


@pytest.fixture
def app():
    app = bare_app("shown")
    app.conf.sqs_backoff = {"store": MemoryStore()}

    @app.task(base=WorkflowTask, bind=True, name="fund", guard=Guard(key="order:{n}", window=3600))
    def fund(self, n):
        with self.workflow(f"order:{n}") as order:
            order.step("account", lambda: "DE89 3704")
            order.step("release", lambda: "released")
        self.step("note", lambda: "noted")

    fund.apply((7,), task_id="message 1")
    yield app
    app.close()


def run(app: Celery, *arguments: str, answer: str | None = None) -> Result:
    celery = CLIContext(app=app, no_color=True, workdir=None, quiet=False)
    return CliRunner().invoke(safe.sqs_safe, list(arguments), obj=celery, input=answer)


def test_list(app):
    """``list`` and ``show`` print the records with a key such as ``order:7``, without results."""
    done = run(app, "list", "order:7")
    assert done.exit_code == safe.DONE
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["guard", "done", "order:7"],
        ["workflow", "ended", "order:7"],
        ["step", "done", "account"],
        ["step", "done", "release"],
    ]
    assert "DE89" not in run(app, "show", "order:7").stdout


def test_show_results(app):
    """``show --show-results`` also prints the results of steps."""
    done = run(app, "show", "order:7", "--show-results", "--json", "--kind", "step")
    assert [json.loads(line)["result"] for line in done.stdout.splitlines()] == [
        "DE89 3704",
        "released",
    ]


def test_list_message(app):
    """``list task:NAME:ID`` shows the records of one message of a task."""
    assert "note" in run(app, "list", "task:fund:message 1").stdout


def test_scope_like_message(app):
    """``list`` shows a workflow even if its key begins with ``task:``, as for a message.

    An application with a model ``Task`` may use ``workflow(f"task:{task.pk}")``.
    """

    @app.task(base=WorkflowTask, bind=True, name="close")
    def close(self):
        with self.workflow("task:7") as work:
            work.step("account", lambda: "closed")

    close.apply()
    assert [line.split()[:2] for line in run(app, "list", "task:7").stdout.splitlines()] == [
        ["workflow", "ended"],
        ["step", "done"],
    ]


def test_free(app):
    """``free`` asks first, and frees a record only if the user agrees or has passed ``--yes``."""
    Lock(records_of(app), "order:7").acquire()
    assert run(app, "free", "order:7", "--kind", "lock", answer="n\n").exit_code != safe.DONE
    assert "lock" in run(app, "list", "order:7").stdout
    assert run(app, "free", "order:7", "--kind", "lock", answer="y\n").exit_code == safe.DONE
    assert "lock" not in run(app, "list", "order:7").stdout
    assert run(app, "free", "order:7", "--kind", "guard", "--yes").exit_code == safe.DONE
    assert app.tasks["fund"].apply((7,), task_id="message 2").state == "SUCCESS"


def test_free_step(app):
    """``free --name`` frees one step and keeps the others."""
    run(app, "free", "order:7", "--kind", "step", "--name", "release", "--yes")
    left = run(app, "list", "order:7").stdout
    assert "account" in left
    assert "release" not in left


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["list", "order:8"], safe.FOUND),
        (["free", "order:7"], safe.USAGE),
        (["forget", "order:7"], safe.USAGE),
    ],
)
def test_exit_codes(app, arguments, code):
    """An unknown key and invalid arguments have exit codes of their own."""
    assert run(app, *arguments).exit_code == code


def test_no_store(app):
    """If the app has no store, the error names the setting."""
    app.conf.sqs_backoff = {}
    done = run(app, "list", "order:7")
    assert (done.exit_code, "['store']" in done.output) == (safe.USAGE, True)


def test_store_away(app, monkeypatch):
    """If the store does not answer, the command ends with an exit code of its own."""

    def away(*_):
        raise StoreUnavailable("away")

    monkeypatch.setattr(app.conf.sqs_backoff["store"], "get", away)
    assert run(app, "list", "order:7").exit_code == safe.UNREACHABLE


@pytest.mark.parametrize(
    "planted",
    [
        "[1]",
        '{"state": "\\u001b[2J", "steps": {}}',
        '{"state": ["open"], "steps": {}}',
        '{"state": "open", "steps": 5}',
        '{"state": "open", "steps": {"a": 1}}',
        '{"state": "open", "steps": {"a": {"state": "\\u001b[2J"}}}',
        '{"state": "done", "steps": {}, "result": "{"}',
        '{"state": "done", "steps": {}, "result": 5}',
    ],
)
def test_planted_record(app, planted):
    """``show`` marks a record with invalid content as rejected, and prints none of the content.

    If records are not signed, anyone who can write to the store may have written it.
    """
    records = records_of(app)
    for kind in ("guard", "scope"):
        key = records.key(kind, "order:8")
        records.store.add(key, records._signed(key, planted)[0], 60)
    shown = run(app, "show", "order:8", "--show-results")
    assert shown.exception is None
    assert "workflow  rejected" in shown.stdout
    assert "\x1b" not in shown.stdout
    assert run(app, "free", "order:8", "--kind", "workflow", "--yes").exit_code == safe.DONE


def test_free_undone_workflow(app):
    """If a workflow was undone and then freed, its steps run again with new idempotency keys."""
    app.conf.task_always_eager = True
    done = []

    @app.task(name="take_back")
    def take_back(result, key):
        done.append(("taken back", key))

    @app.task(bind=True, name="post_entry")
    def post_entry(self, result):
        self.step("entry", lambda: done.append("entry"))

    @app.task(base=WorkflowTask, bind=True, name="release")
    def release(self, address):
        with self.workflow("order:8") as order:
            key = order.key("release")
            undo, confirm = take_back.s(key), post_entry.s()
            order.step("release", lambda key: done.append(key), key, undo=undo, confirm=confirm)
            if address == "wrong":
                raise NonRetryable
        return "released"

    assert release.apply(("wrong",), task_id="message").state == "FAILURE"
    old = done[0]
    assert done == [old, "entry", ("taken back", old)]
    assert isinstance(release.apply(("right",), task_id="message").result, Compensated)
    assert run(app, "free", "order:8", "--kind", "workflow", "--yes").exit_code == safe.DONE
    done.clear()
    assert release.apply(("right",), task_id="message").result == "released"
    new = done[0]
    assert done == [new, "entry"]
    assert new != old, "with the old key, the provider would give its old answer and do nothing"
    assert release.apply(("right",), task_id="message").result == "released"
    assert len(done) == 2


def test_free_keeps_step(app):
    """If a step of an undone workflow had no ``undo``, ``free`` keeps the step's record.

    The step is still done, so it must not run again.
    """
    app.conf.task_always_eager = True
    done = []

    @app.task(name="take_back")
    def take_back(result): ...

    @app.task(base=WorkflowTask, bind=True, name="open_account")
    def open_account(self, *, is_closed):
        with self.workflow("order:8") as order:
            for name, undo in (("account", None), ("release", take_back.s())):
                order.step(name, lambda key: done.append(key), order.key(name), undo=undo)
            if is_closed:
                raise NonRetryable
        return "released"

    open_account.apply(kwargs={"is_closed": True}, task_id="message")
    freed = run(app, "free", "order:8", "--kind", "workflow", "--yes")
    assert freed.exit_code == safe.DONE
    assert "was not undone: account" in freed.stderr
    assert "step      done         account" in run(app, "list", "order:8").stdout
    assert open_account.apply(kwargs={"is_closed": False}, task_id="message").result == "released"
    account, release, released_again = done
    assert len({account, release, released_again}) == 3


def test_free_ended_workflow(app):
    """If a workflow has ended, ``free`` deletes all its steps, and names none as kept."""
    app.conf.task_always_eager = True

    @app.task(base=WorkflowTask, bind=True, name="open_account")
    def open_account(self):
        with self.workflow("order:9") as order:
            order.step("account", lambda: None)

    open_account.apply(task_id="message")
    freed = run(app, "free", "order:9", "--kind", "workflow", "--yes")
    assert freed.exit_code == safe.DONE
    assert "kept" not in freed.stderr
    assert "account" not in run(app, "list", "order:9").stdout


def test_free_closing_workflow(app):
    """If a workflow is just being undone, ``free`` warns and names the task that undoes it."""
    Document(records_of(app), "scope", "order:7").update(lambda _: {"state": CLOSING})
    freed = run(app, "free", "order:7", "--kind", "workflow", answer="n")
    assert "celery_sqs_backoff.take_back" in freed.stderr
    assert "workflow  closing      order:7" in run(app, "list", "order:7").stdout
