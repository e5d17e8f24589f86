"""Nothing is sent before the commit, on a real database."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, Task

from celery_sqs_backoff import SQSBackoffTask
from celery_sqs_backoff.safe import SafeTask, StoreInTransaction
from celery_sqs_backoff.safe.commit import after_commit
from celery_sqs_backoff.store.connections import refuse_open_transaction
from celery_sqs_backoff.store.memory import MemoryStore
from tests.support.redis_database import redis_url

from .django_app import project
from .stores import postgresql_database, require


@pytest.fixture(scope="module")
def aliases() -> Iterator[tuple[str, str]]:
    require("postgresql")
    with postgresql_database() as name:
        for alias in ("commits", "commits_too"):
            project.add_database(alias, project.postgresql(name))
        yield "commits", "commits_too"
        project.close("commits")
        project.close("commits_too")


def test_without_a_transaction_it_is_sent_at_once() -> None:
    sent: list[int] = []
    after_commit(lambda: sent.append(1))
    assert sent == [1]


def test_it_is_sent_after_the_commit_and_never_after_a_rollback(aliases: tuple[str, str]) -> None:
    from django.db import transaction

    sent: list[str] = []
    with transaction.atomic(using=aliases[0]):
        after_commit(lambda: sent.append("committed"))
        assert sent == []
    assert sent == ["committed"]
    with transaction.atomic(using=aliases[0]):
        after_commit(lambda: sent.append("rolled back"))
        transaction.set_rollback(True, using=aliases[0])
    assert sent == ["committed"]


def test_it_waits_for_the_transactions_of_all_databases(aliases: tuple[str, str]) -> None:
    from django.db import transaction

    sent: list[int] = []
    with transaction.atomic(using=aliases[0]):
        with transaction.atomic(using=aliases[1]):
            after_commit(lambda: sent.append(1))
        assert sent == []
    assert sent == [1]


class Host(SafeTask, Task):  # type: ignore[misc]
    abstract = True


def test_tasks_wait_for_the_commit_and_a_step_is_refused_before_it(
    aliases: tuple[str, str],
) -> None:
    """A rollback would take back what the step did, and not that it is recorded as done."""
    from django.db import transaction

    app = Celery("commits", broker="memory://", set_as_current=False)
    app.finalize()
    app.conf.update(task_always_eager=True, sqs_backoff={"store": MemoryStore()})
    ran: list[Any] = []

    @app.task(shared=False, base=Host, name="ran")
    def note(*args: Any) -> None:
        ran.append(args[0])

    @app.task(shared=False, base=Host, bind=True, name="workflow")
    def workflow(task: Any) -> None: ...

    workflow.push_request(id="message", called_directly=False)
    with transaction.atomic(using=aliases[0]):
        note.delay_on_commit("delayed")
        note.apply_async_on_commit(("applied",))
        with pytest.raises(StoreInTransaction, match="inside the step's function"):
            workflow.step("a", pytest.fail, confirm=note.s())
        assert ran == []
    assert ran == ["delayed", "applied"]
    workflow.step("a", lambda: "confirmed", confirm=note.s())
    assert ran == ["delayed", "applied", "confirmed"]


def test_with_autocommit_off_tasks_and_steps_do_what_django_does(
    aliases: tuple[str, str],
) -> None:
    """Django runs no hooks then, and says so. Sent at once, a task would come before its data."""
    from django.db import transaction

    transaction.set_autocommit(False, using=aliases[0])
    try:
        with pytest.raises(transaction.TransactionManagementError):
            after_commit(pytest.fail)
        with pytest.raises(StoreInTransaction, match="while autocommit is off"):
            refuse_open_transaction("A step", why="")
    finally:
        transaction.rollback(using=aliases[0])
        transaction.set_autocommit(True, using=aliases[0])


def test_the_transaction_of_a_django_test_case_does_not_count(aliases: tuple[str, str]) -> None:
    from django.db import transaction

    around = transaction.atomic(using=aliases[0])
    around._from_testcase = True  # what django.test.TestCase sets
    with around:
        refuse_open_transaction("A step", why="")
        with pytest.raises(StoreInTransaction), transaction.atomic(using=aliases[0]):
            refuse_open_transaction("A step", why="")


def test_a_lock_does_not_end_before_the_transaction_that_it_was_taken_in(
    aliases: tuple[str, str],
) -> None:
    """``@transaction.atomic`` on a task: the next holder read the balance of before the commit."""
    from django.db import connections, transaction

    store = f"{redis_url()}?client_name={aliases[0]}"
    require("redis")
    app = Celery("commits", broker="memory://", set_as_current=False)
    app.finalize()
    app.conf.update(task_always_eager=True, sqs_backoff={"store": store, "secret": "one"})
    paid: list[str] = []

    def withdraw(account: str) -> None:
        with connections[aliases[0]].cursor() as cursor:
            cursor.execute("SELECT 100")
        paid.append(account)

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="outside")
    @transaction.atomic(using=aliases[0])
    def outside(self: Any, way: str) -> None:
        with getattr(self, way)("account:7"):
            withdraw("outside")

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="inside")
    def inside(self: Any, way: str) -> None:
        with getattr(self, way)("account:7"), transaction.atomic(using=aliases[0]):
            withdraw("inside")

    for way in ("exclusive", "workflow"):
        refused = outside.apply((way,)).result
        assert isinstance(refused, StoreInTransaction)
        assert "open the transaction inside its block" in str(refused)
        assert paid == []
        assert inside.apply((way,)).state == "SUCCESS"
        assert paid.pop() == "inside"


def test_a_test_can_run_the_hooks_of_its_transaction(aliases: tuple[str, str]) -> None:
    """As ``TestCase.captureOnCommitCallbacks(execute=True)``: until no hook has added another."""
    from django.db import connections, transaction
    from django.test import TestCase

    sent: list[str] = []
    arounds = [transaction.atomic(using=alias) for alias in aliases]
    for around in arounds:
        around._from_testcase = True
    with arounds[0], arounds[1]:
        with TestCase.captureOnCommitCallbacks(using=aliases[0]) as hooks:
            after_commit(lambda: sent.append("outside a block"))
            with transaction.atomic(using=aliases[0]):
                after_commit(lambda: sent.append("in a block"))
        assert sent == []
        for hook in hooks:
            hook()
        assert sent == ["outside a block", "in a block"]
        assert len(connections[aliases[0]].run_on_commit) == len(hooks)
