"""Steps and locks refuse to run inside an open transaction of Django."""

import pytest
from celery import Celery

from celery_sqs_backoff import SQSBackoffTask, WorkflowTask
from celery_sqs_backoff.safe import StoreInTransaction
from celery_sqs_backoff.store.connections import refuse_open_transaction
from celery_sqs_backoff.store.memory import MemoryStore
from tests.support.redis_database import redis_url

from .django_app import project
from .stores import postgresql_database, require


@pytest.fixture(scope="module")
def aliases():
    require("postgresql")
    with postgresql_database() as name:
        for alias in ("commits", "commits_too"):
            project.add_database(alias, project.postgresql(name))
        yield "commits", "commits_too"
        project.close("commits")
        project.close("commits_too")


def test_step_in_transaction(aliases):
    """``self.step`` raises an error inside a transaction.

    A rollback would undo the step's work, but not the record that it is done.
    """
    from django.db import transaction

    app = Celery("commits", broker="memory://", set_as_current=False)
    app.finalize()
    app.conf.update(task_always_eager=True, sqs_backoff={"store": MemoryStore()})
    ran = []

    @app.task(shared=False, base=SQSBackoffTask, name="ran")
    def note(*args):
        ran.append(args[0])

    @app.task(shared=False, base=SQSBackoffTask, bind=True, name="workflow")
    def workflow(task): ...

    with (
        transaction.atomic(using=aliases[0]),
        pytest.raises(StoreInTransaction, match="inside the step's function"),
    ):
        workflow.step("a", pytest.fail, confirm=note.s(), scope="order:7")
    assert ran == []
    workflow.step("a", lambda: "confirmed", confirm=note.s(), scope="order:7")
    assert ran == ["confirmed"]


def test_autocommit_off(aliases):
    """``self.step`` raises an error while autocommit is off.

    Django then has an open transaction almost all the time.
    """
    from django.db import transaction

    transaction.set_autocommit(False, using=aliases[0])
    try:
        with pytest.raises(StoreInTransaction, match="while autocommit is off"):
            refuse_open_transaction("A step", why="")
    finally:
        transaction.rollback(using=aliases[0])
        transaction.set_autocommit(True, using=aliases[0])


def test_django_test_case(aliases):
    """The transaction around a Django test case does not count as an open transaction."""
    from django.db import transaction

    around = transaction.atomic(using=aliases[0])
    around._from_testcase = True  # django.test.TestCase sets this
    with around:
        refuse_open_transaction("A step", why="")
        with pytest.raises(StoreInTransaction), transaction.atomic(using=aliases[0]):
            refuse_open_transaction("A step", why="")


def test_lock_in_transaction(aliases):
    """A lock raises an error inside a transaction, because the lock would end before the commit.

    The next task that gets the lock would read data from before the commit.
    """
    from django.db import connections, transaction

    store = f"{redis_url()}?client_name={aliases[0]}"
    require("redis")
    app = Celery("commits", broker="memory://", set_as_current=False)
    app.finalize()
    app.conf.update(task_always_eager=True, sqs_backoff={"store": store, "secret": "one"})
    paid = []

    def withdraw(account):
        with connections[aliases[0]].cursor() as cursor:
            cursor.execute("SELECT 100")
        paid.append(account)

    @app.task(shared=False, base=WorkflowTask, bind=True, name="outside")
    @transaction.atomic(using=aliases[0])
    def outside(self, way):
        with getattr(self, way)("account:7"):
            withdraw("outside")

    @app.task(shared=False, base=WorkflowTask, bind=True, name="inside")
    def inside(self, way):
        with getattr(self, way)("account:7"), transaction.atomic(using=aliases[0]):
            withdraw("inside")

    for way in ("exclusive", "workflow"):
        refused = outside.apply((way,)).result
        assert isinstance(refused, StoreInTransaction)
        assert "open the transaction inside its block" in str(refused)
        assert paid == []
        assert inside.apply((way,)).state == "SUCCESS"
        assert paid.pop() == "inside"
