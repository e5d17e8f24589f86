"""What is owed when a workflow is given up: which tasks, how many, from where they are known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from cryptography.fernet import Fernet
from kombu.utils.json import dumps, loads

from celery_sqs_backoff import SQSBackoffTask
from celery_sqs_backoff.safe import Compensated, RecordRejected
from celery_sqs_backoff.safe.guard import Run
from celery_sqs_backoff.safe.message_end import TakenBack, compensate_scopes_of
from celery_sqs_backoff.safe.names import input_of
from celery_sqs_backoff.safe.scope import Scope, _listed_at, scope_key
from celery_sqs_backoff.safe.shared import compensate_given_up
from celery_sqs_backoff.safe.steps import Steps, step_key
from celery_sqs_backoff.safe.workflow import Workflow
from celery_sqs_backoff.safe.writes import settle
from celery_sqs_backoff.store.memory import MemoryStore
from celery_sqs_backoff.store.protocol import KEEP_SECONDS
from celery_sqs_backoff.store.settings import vault_of
from celery_sqs_backoff.store.vault import Vault

DAY = 24 * 3600.0


class Shared:
    """A store of the user's own, which others may write to."""

    def __init__(self, store: MemoryStore) -> None:
        self.add, self.get = store.add, store.get
        self.replace, self.delete = store.replace, store.delete
        self.records = store._records


@pytest.fixture(autouse=True)
def no_django(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test of this process may have set Django up, whose SECRET_KEY would sign."""
    monkeypatch.setattr("celery_sqs_backoff.store.settings._django_secrets", lambda: ())


@pytest.fixture
def now() -> list[float]:
    return [1_000_000.0]


@pytest.fixture
def store(now: list[float]) -> Shared:
    return Shared(MemoryStore(clock=lambda: now[0]))


@pytest.fixture
def app(store: Shared) -> Iterator[Celery]:
    app = Celery("undo", broker="memory://", set_as_current=False)
    app.finalize()
    app.conf.task_always_eager = True
    app.conf.sqs_backoff = {"store": store, "secret": "one"}
    yield app
    app.close()


@pytest.fixture
def undone(app: Celery) -> list[Any]:
    undone: list[Any] = []

    @app.task(shared=False, base=SQSBackoffTask, name="take_back")
    def take_back(done: object, name: str, padding: str = "") -> None:
        undone.append((name, done))

    @app.task(shared=False, base=SQSBackoffTask, name="refund")
    def refund(*args: object) -> None:
        pytest.fail("a record has said which task is to be sent")

    return undone


def steps(app: Celery, run: str = "run", clock: Any = None) -> Steps:
    options = {} if clock is None else {"clock": clock}
    return Steps(vault_of(app), "scope:order:7", app, Run("message", run), **options)


def do(these: Steps, app: Celery, name: Any, result: Any = "done", padding: str = "") -> Any:
    undo = app.tasks["take_back"].s(str(name), padding=padding)
    results = [result]  # a list: what the provider answers is no input
    return these.do(name, lambda: results[0], (), {}, undo=undo, confirm=None)


def test_7_and_its_text_are_one_step_and_undone_once(app: Celery, undone: list[Any]) -> None:
    do(steps(app), app, 7)
    do(steps(app, "rerun"), app, "7")
    steps(app, "another").compensate()
    assert undone == [("7", "done")]


def test_two_runs_that_list_steps_at_once_lose_none(app: Celery, undone: list[Any]) -> None:
    """The list is one record: who writes it second must not write what it read before."""
    scope = Scope(vault_of(app), "scope:order:7")
    do(steps(app), app, "first")
    vault, others = vault_of(app), ["b"]

    def get_while_another_writes(key: str) -> Any:
        seen = vault.get(key)
        if others:
            do(steps(app, "other"), app, others.pop())
        return seen

    mine = steps(app)
    slow: Any = SimpleNamespace(get=get_while_another_writes, add=vault.add, replace=vault.replace)
    mine.scope._vault = slow
    do(mine, app, "a")
    assert scope.read()["steps"] == ["first", "b", "a"]
    steps(app, "another").compensate()
    assert [name for name, _ in undone] == ["a", "b", "first"]


def test_a_step_that_a_third_run_has_begun_anew_is_joined_too(
    app: Celery, undone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run that had begun it took its note back before this one had joined."""
    key, joins = step_key("scope:order:7", "a"), settle
    undo = app.tasks["take_back"].s("a")
    given = vault_of(app).digest("input", input_of(fail, (), {}))
    first, third = steps(app, "first"), steps(app, "third")
    notes = [first._begun(key, given, undo)[0]]

    def settle_late(*args: Any) -> bool:
        if len(notes) == 1:
            first._forget(key, notes[0])
            notes.append(third._begun(key, given, undo)[0])
        return joins(*args)

    monkeypatch.setattr("celery_sqs_backoff.safe.steps.settle", settle_late)
    with pytest.raises(TimeoutError):
        steps(app, "joining").do("a", fail, (), {}, undo=undo, confirm=None)
    third._forget(key, notes[1])
    steps(app, "another").compensate()
    assert undone == [("a", None)]


def fail() -> None:
    raise TimeoutError("the answer was lost")


def test_a_step_whose_undo_would_not_fit_into_a_message_is_refused_before_it_is_done(
    app: Celery, undone: list[Any]
) -> None:
    """256 KiB on SQS. A message that cannot be sent would be owed for ever."""
    these, done = steps(app), []

    def do_all() -> None:
        for number in range(1000):
            do(these, app, number, padding="x" * 2000)
            done.append(str(number))

    with pytest.raises(ValueError, match="one message"):
        do_all()
    assert 30 < len(done) < 60
    assert vault_of(app).get(step_key("scope:order:7", str(len(done)))) is None
    these.do("no undo", lambda: 1, (), {}, undo=None, confirm=None)
    these.compensate()
    assert [name for name, _ in undone] == done[::-1]


def test_results_that_do_not_fit_are_left_out_of_the_undoing_tasks(
    app: Celery, undone: list[Any]
) -> None:
    """``undo`` gets ``None`` for them, as for a step in doubt."""
    these = steps(app)
    do(these, app, "small", "done")
    for number in range(3):
        do(these, app, f"big {number}", "x" * 50_000)
    these.compensate()
    assert [done for _, done in undone] == [None, None, None, "done"]


def test_a_step_is_kept_for_30_days_after_it_was_last_used(
    app: Celery, undone: list[Any], now: list[float]
) -> None:
    """A message that is redriven every two weeks must not do its steps again."""
    for number in range(5):
        clock = lambda: now[0]  # noqa: E731
        assert do(steps(app, f"run {number}", clock), app, "release", number) == 0
        now[0] += 14 * DAY
    assert KEEP_SECONDS < 5 * 14 * DAY


def test_the_list_of_steps_is_kept_as_long_as_they_are(
    app: Celery, undone: list[Any], now: list[float]
) -> None:
    """Else nothing would be taken back of what is still recorded as done."""
    for number in range(2):
        do(steps(app, f"run {number}", lambda: now[0]), app, "release")
        now[0] += 20 * DAY
    steps(app).compensate()
    assert undone == [("release", "done")]


def test_a_name_that_is_too_long_for_the_list_is_refused(app: Celery, undone: list[Any]) -> None:
    with pytest.raises(ValueError, match="200"):
        do(steps(app), app, "x" * 201)


def test_a_planted_or_moved_record_sends_no_task(app: Celery, store: Shared) -> None:
    """Who can write to the store has no secret: nothing that it says is done."""
    vault, forged = vault_of(app), Vault(store, namespace="undo")
    signature = app.signature("refund", args=(1_000_000,))
    key = step_key("scope:order:7", "account")
    planted = {"state": "confirm", "result": '"IBAN"', "undo": dumps(dict(signature)), "input": ""}
    forged.add(key, dumps(planted), 600)
    forged.add(scope_key("scope:order:7"), dumps({"state": "closing", "steps": ["account"]}), 600)
    at = _listed_at(vault.digest("message", "fund", "message 1"))
    forged.add(at, dumps(["scope:order:7"]), 600)
    assert compensate_given_up(app, "fund", "message 1"), "it takes a person: the message goes"
    with pytest.raises(RecordRejected):
        steps(app).do("account", pytest.fail, (), {}, undo=None, confirm=None)


def test_what_confirms_a_step_is_what_the_code_names(app: Celery, undone: list[Any]) -> None:
    """Also on a store without signatures: the record only says that it is to be confirmed."""
    app.conf.sqs_backoff = {"store": app.conf.sqs_backoff["store"]}
    vault, key = vault_of(app), step_key("scope:order:7", "account")
    signature = dict(app.signature("refund", args=(1_000_000,)))
    these, undo = steps(app), app.tasks["take_back"].s("confirmed")
    these.do("account", lambda: "DE89", (), {}, undo=None, confirm=None)
    text = vault.get(key) or ""
    planted = loads(text) | {"state": "confirm", "confirm": signature, "undo": dumps(signature)}
    assert vault.replace(key, text, dumps(planted), 600)
    steps(app, "rerun").do("account", lambda: 0, (), {}, undo=None, confirm=undo)
    steps(app, "another").compensate()
    assert undone == [("confirmed", "DE89")]


@pytest.mark.parametrize("is_signed", [True, False])
def test_the_record_says_what_to_undo_only_if_it_is_signed(
    app: Celery, undone: list[Any], is_signed: bool
) -> None:
    """There is no other way after a crash, and none without a signature."""
    if not is_signed:
        app.conf.sqs_backoff = {"store": app.conf.sqs_backoff["store"]}
    vault = vault_of(app)
    assert vault.is_trusted is is_signed
    run = Run("message", "run")
    with Workflow(vault, "scope:order:7", app, run, lease=60, namespace="") as order:
        undo = app.tasks["take_back"].s("account")
        order.step("account", lambda: "DE89", undo=undo)
        order._steps.scope.change(ended=False)
        assert order._steps.scope.read()["state"] == "open"
    order._steps.scope.change(ended=False)
    compensate_scopes_of(vault, app, run)
    assert undone == ([("account", "DE89")] if is_signed else [])


def test_a_task_id_that_no_encoding_can_hold_is_given_up_like_any_other(app: Celery) -> None:
    """JSON can name half a surrogate pair. A message that kills its process would never end."""
    assert compensate_given_up(app, "fund", "\ud800")


def test_a_record_that_cannot_be_decrypted_does_not_keep_the_message_for_ever(
    app: Celery, undone: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    settings = dict(app.conf.sqs_backoff)
    app.conf.sqs_backoff = settings | {"encrypt": Fernet(Fernet.generate_key())}
    vault = vault_of(app)
    message = vault.digest("message", "fund", "message 1")
    workflow = Workflow(
        vault, "scope:order:7", app, Run(message, "run"), lease=60, namespace=""
    ).__enter__()
    workflow.step("account", lambda: "DE89", undo=app.tasks["take_back"].s("account"))
    app.conf.sqs_backoff = settings | {"encrypt": Fernet(Fernet.generate_key())}
    assert compensate_given_up(app, "fund", "message 1")
    assert "sqs_backoff.undo_by_hand" in caplog.text
    assert undone == []


def test_a_planted_record_of_one_workflow_does_not_keep_another_from_being_taken_back(
    app: Celery, undone: list[Any], store: Shared
) -> None:
    run = Run.of(vault_of(app), "fund", "message 1", "run")
    for scope in ("scope:a", "scope:b"):
        workflow = Workflow(vault_of(app), scope, app, run, lease=60, namespace="")
        with suppress(OSError), workflow:
            workflow.step("pay", str, 1, undo=app.tasks["take_back"].s(scope))
            raise OSError
    at = vault_of(app).key_in_store(scope_key("scope:a"))
    store.records[at] = ("s1:00:{}", store.records[at][1])
    assert compensate_given_up(app, "fund", "message 1")
    assert undone == [("scope:b", "1")]


def test_encryption_can_be_switched_on_while_workflows_are_under_way(
    app: Celery, undone: list[Any]
) -> None:
    do(steps(app), app, "account", "DE89")
    settings = dict(app.conf.sqs_backoff)
    app.conf.sqs_backoff = settings | {"encrypt": Fernet(Fernet.generate_key())}
    assert do(steps(app, "rerun"), app, "account", "another") == "DE89"


def test_an_encrypted_store_does_not_show_whose_workflow_it_is(
    app: Celery, undone: list[Any], store: Shared
) -> None:
    """Its scope is a name such as a customer's; also where it was listed before encryption."""
    settings = dict(app.conf.sqs_backoff)
    run = Run.of(vault_of(app), "fund", "message 1", "run")

    def fail_in(scope: str) -> None:
        workflow = Workflow(vault_of(app), scope, app, run, lease=60, namespace="")
        with suppress(OSError), workflow:
            workflow.step("pay", str, 1, undo=app.tasks["take_back"].s(scope))
            raise OSError

    fail_in("scope:customer:7")
    app.conf.sqs_backoff = settings | {"encrypt": Fernet(Fernet.generate_key())}
    fail_in("scope:joe@shop.example")
    assert not [value for value, _ in store.records.values() if "joe@" in value]
    assert compensate_given_up(app, "fund", "message 1")
    assert undone == [("scope:customer:7", "1"), ("scope:joe@shop.example", "1")]


def test_a_run_that_ends_late_does_not_end_the_next_ones_workflow(
    app: Celery, undone: list[Any], now: list[float]
) -> None:
    """Paused for longer than its lease, in its block's last line."""
    vault = vault_of(app)

    def workflow(message: str) -> Workflow:
        return Workflow(vault, "scope:order:7", app, Run(message, message), lease=60, namespace="")

    paused = workflow("message 1").__enter__()
    now[0] += 61
    other = workflow("message 2").__enter__()
    other.step("account", lambda: "DE89", undo=app.tasks["take_back"].s("account"))
    paused.__exit__(None, None, None)
    compensate_scopes_of(vault, app, Run("message 2", "given up"))
    assert undone == [("account", "DE89")]


@pytest.mark.parametrize("other_lives", [True, False])
def test_what_is_given_up_while_another_is_about_to_go_on_is_taken_back(
    app: Celery, undone: list[Any], now: list[float], other_lives: bool
) -> None:
    """The other holds the lock, and may end before it answers for the steps, too."""
    vault = vault_of(app)

    def workflow(message: str) -> Workflow:
        return Workflow(vault, "scope:order:7", app, Run(message, message), lease=60, namespace="")

    def give_up() -> TakenBack:
        return compensate_scopes_of(vault, app, Run("message 1", "given up"))

    paused = workflow("message 1").__enter__()
    paused.step("account", lambda: "DE89", undo=app.tasks["take_back"].s("account"))
    now[0] += 61
    other = workflow("message 2")
    other._lock.acquire()
    assert give_up() is TakenBack.OWED
    if other_lives:
        with pytest.raises(Compensated):
            other._own()
    other._lock.release()
    assert give_up() is TakenBack.DONE
    assert undone == [("account", "DE89")]


def test_django_configured_late_changes_the_secret(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vault that was made before would sign otherwise than all other processes."""
    app.conf.sqs_backoff = {"store": app.conf.sqs_backoff["store"]}
    secrets: list[str] = []
    monkeypatch.setattr("celery_sqs_backoff.store.settings._django_secrets", lambda: list(secrets))
    assert not vault_of(app).is_trusted
    secrets.append("SECRET_KEY")
    assert vault_of(app).is_trusted


@pytest.mark.parametrize("hook", ["on_success", "on_failure"])
def test_what_a_hook_leaves_half_done_is_taken_back_by_the_next_message(
    app: Celery, undone: list[Any], hook: str
) -> None:
    """Its own message has ended, and may never come back."""

    def work(self: Any, *_: Any) -> None:
        with self.workflow("order:7") as order:
            order.step("pay", lambda: "paid", undo=app.tasks["take_back"].s("pay"))
            raise ConnectionError

    base: Any = type("Hooked", (SQSBackoffTask,), {"abstract": True, hook: work})

    @app.task(shared=False, base=base, name="hooked")
    def hooked() -> None:
        if hook == "on_failure":
            raise ValueError

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="next")
    def next_one(self: Any) -> None:
        with self.workflow("order:7"):
            raise ValueError

    with suppress(ConnectionError):
        hooked.apply(task_id="A")
    assert undone == []
    next_one.apply(task_id="B")
    assert undone == [("pay", "paid")]
