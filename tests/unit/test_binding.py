"""What is settled when a task is bound: whose settings count, and what is refused."""

import sys
import types

import pytest
from celery import Celery, Task
from celery.exceptions import ImproperlyConfigured
from celery.worker.request import Request
from kombu.utils.imports import symbol_by_name

from celery_sqs_backoff import SQSBackoffTask
from celery_sqs_backoff.classifiers import requests_errors
from celery_sqs_backoff.retry.decision import End
from celery_sqs_backoff.task.handover import BackoffRetry

SETTINGS = {
    "reject_on_worker_lost": False,
    "retry_on_worker_lost": False,
    "acks_on_failure_or_timeout": True,
    "acks_on_failure": True,
    "acks_on_timeout": True,
}
#: Those that this version of Celery has.
KNOWN = {name: value for name, value in SETTINGS.items() if hasattr(Task, name)}


def an_app(broker="sqs://", **conf):
    app = Celery("binding", broker=broker, set_as_current=False)
    app.conf.update(conf)
    return app


def define(app, **options):
    @app.task(base=SQSBackoffTask, name="mail", lazy=False, shared=False, **options)
    def mail():
        """Send nothing."""

    return mail


@pytest.mark.parametrize("name", KNOWN)
def test_settings_that_bypass_budgets_are_overruled(name):
    """An app's setting, or a task's, is overruled."""
    app = an_app(task_reject_on_worker_lost=True)

    def run():
        """Do nothing."""

    task = app.task(base=SQSBackoffTask, name="mail", lazy=False, **{name: not SETTINGS[name]})(run)
    assert (getattr(task, name), task.reject_on_worker_lost) == (SETTINGS[name], False)


def test_on_another_broker_they_are_the_users():
    task = define(an_app("redis://"), reject_on_worker_lost=True, Request=Theirs)
    assert (task.reject_on_worker_lost, task.Request) == (True, Theirs)


#: The worker's request class, found as Celery finds it.
BackoffRequest = symbol_by_name(SQSBackoffTask.Request)


class Ours(BackoffRequest):
    """A subclass of ours, as a company may have."""


class Theirs(Request):
    """A company's own, from before."""


@pytest.fixture
def company(monkeypatch):
    module = types.ModuleType("company")
    module.Ours, module.Theirs = Ours, Theirs
    monkeypatch.setitem(sys.modules, "company", module)


@pytest.mark.parametrize("request_class", [Ours, "company:Ours"])
def test_a_subclass_of_our_request_is_fine(company, request_class):
    assert define(an_app(), Request=request_class).Request is request_class


@pytest.mark.parametrize(
    "request_class", [Theirs, "company:Theirs", "celery.worker.request:Request"]
)
def test_any_other_request_class_is_refused_by_name(company, request_class):
    """It would delete the messages that wait for their retry."""
    with pytest.raises(ImproperlyConfigured, match=r"mail: invalid Request .* expected a subclass"):
        define(an_app(), Request=request_class)


def test_celerys_own_tasks_keep_celerys_ways():
    """``chord_unlock`` polls by retrying itself: each kept message would use up a receive."""
    app = Celery("own", broker="sqs://", task_cls=SQSBackoffTask, set_as_current=False)
    app.finalize()
    unlock, stock = app.tasks["celery.chord_unlock"], Celery(set_as_current=False)
    stock.finalize()
    expected = stock.tasks["celery.chord_unlock"]
    assert isinstance(unlock, SQSBackoffTask)
    assert not unlock.is_covered
    for name in ("Request", "Strategy", "acks_late", "max_retries", "default_retry_delay"):
        assert getattr(unlock, name) == getattr(expected, name), name
    assert not hasattr(unlock.run, "_is_wrapped")


def test_a_retry_of_celerys_own_task_publishes_as_celery_does(monkeypatch):
    app = Celery("own", broker="sqs://", task_cls=SQSBackoffTask, set_as_current=False)
    app.finalize()
    sent = []
    monkeypatch.setattr("celery.canvas.Signature.apply_async", lambda self, *a, **k: sent.append(k))
    unlock = app.tasks["celery.chord_unlock"]
    unlock.push_request(id="u", args=(), kwargs={}, retries=99, called_directly=False)
    with pytest.raises(Exception) as raised:  # noqa: PT011
        unlock.retry(countdown=1, max_retries=None)
    assert not isinstance(raised.value, BackoffRetry)
    assert len(sent) == 1


def test_an_uncalled_factory_of_a_classifier_is_refused():
    with pytest.raises(ImproperlyConfigured, match=r"did you mean requests_errors\(\)\?"):
        define(an_app(), classify=requests_errors)


def test_messages_name_the_setting_of_django():
    app = an_app()
    app.namespace = "CELERY"
    app.conf.sqs_backoff = {"stroe": "memory://"}
    with pytest.raises(ImproperlyConfigured) as refused:
        define(app)
    assert "CELERY_SQS_BACKOFF: unknown setting 'stroe' (did you mean 'store'?)" in str(
        refused.value
    )


@pytest.mark.parametrize(
    "foreign",
    [
        pytest.param(["uploads"], id="a list"),
        pytest.param({"": "shop.from_s3"}, id="a queue without a name"),
        pytest.param({"uploads": 3}, id="no callable"),
        pytest.param({3: "shop.from_s3"}, id="a queue that is a number"),
    ],
)
def test_a_foreign_setting_that_cannot_work_is_refused(foreign):
    app = an_app()
    app.conf.sqs_backoff = {"foreign": foreign}
    with pytest.raises(ImproperlyConfigured, match="invalid foreign"):
        define(app)


def test_every_end_is_documented():
    from celery_sqs_backoff.retry import decision

    table = (decision.__doc__ or "").partition("without a decision")[2]
    for end in End:
        assert f"\n{end.value} " in table, end


def test_a_class_without_a_name_has_the_one_that_celery_gives_its_task():
    class Nameless(SQSBackoffTask):
        def run(self):
            return "done"

    task = an_app().register_task(Nameless())
    assert task.name.endswith(".Nameless")
    assert task() == "done"

    class Early(Nameless):
        acks_late = False

    with pytest.raises(ImproperlyConfigured, match="Early: acks_late=False"):
        an_app().register_task(Early())
