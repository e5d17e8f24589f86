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
def test_overruled_settings(name):
    """Settings that bypass the budgets are overruled, whether the app or the task sets them."""
    app = an_app(task_reject_on_worker_lost=True)

    def run():
        """Do nothing."""

    task = app.task(base=SQSBackoffTask, name="mail", lazy=False, **{name: not SETTINGS[name]})(run)
    assert (getattr(task, name), task.reject_on_worker_lost) == (SETTINGS[name], False)


def test_settings_on_other_broker():
    """On another broker the user's own settings apply."""
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
def test_request_subclass(company, request_class):
    """A task may use a subclass of our request class."""
    assert define(an_app(), Request=request_class).Request is request_class


@pytest.mark.parametrize(
    "request_class", [Theirs, "company:Theirs", "celery.worker.request:Request"]
)
def test_foreign_request_class(company, request_class):
    """A task with a request class that is no subclass of ours is refused.

    It would delete the messages that wait for their retry.
    """
    with pytest.raises(ImproperlyConfigured, match=r"mail: invalid Request .* expected a subclass"):
        define(an_app(), Request=request_class)


def test_own_tasks_of_celery():
    """Celery's own tasks keep Celery's settings.

    ``chord_unlock`` polls by retrying itself, so each kept message would use up a receive.
    """
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


def test_retry_of_celerys_task(monkeypatch):
    """A retry of Celery's own task is published, as Celery does."""
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


def test_uncalled_classifier():
    """A classifier's factory that was not called is refused."""
    with pytest.raises(ImproperlyConfigured, match=r"did you mean requests_errors\(\)\?"):
        define(an_app(), classify=requests_errors)


def test_django_setting_name():
    """Error messages name the setting as Django's settings file does."""
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
def test_invalid_foreign(foreign):
    """An invalid ``foreign`` setting is refused."""
    app = an_app()
    app.conf.sqs_backoff = {"foreign": foreign}
    with pytest.raises(ImproperlyConfigured, match="invalid foreign"):
        define(app)


def test_table_of_ends():
    """The docstring of ``retry.decision`` lists every end."""
    from celery_sqs_backoff.retry import decision

    table = (decision.__doc__ or "").partition("without a decision")[2]
    for end in End:
        assert f"\n{end.value} " in table, end


def test_class_without_name():
    """A task class without a name gets the name that Celery gives its task."""

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
