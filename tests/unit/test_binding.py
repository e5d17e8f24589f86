"""The settings that a task takes over from its app, and those that it refuses."""

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

#: Settings of Celery that could bypass our retries, with the values that our task class gives them.
SETTINGS = {
    "reject_on_worker_lost": False,
    "retry_on_worker_lost": False,
    "acks_on_failure_or_timeout": True,
    "acks_on_failure": True,
    "acks_on_timeout": True,
}
#: The settings that the installed version of Celery has.
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
    """On SQS our task class overrules settings that could bypass our retries.

    The app or the task itself may have set them.
    """
    app = an_app(task_reject_on_worker_lost=True)

    def run():
        """Do nothing."""

    task = app.task(base=SQSBackoffTask, name="mail", lazy=False, **{name: not SETTINGS[name]})(run)
    assert (getattr(task, name), task.reject_on_worker_lost) == (SETTINGS[name], False)


def test_settings_on_other_broker():
    """If the broker is not SQS, the user's own settings apply."""
    task = define(an_app("redis://"), reject_on_worker_lost=True, Request=Theirs)
    assert (task.reject_on_worker_lost, task.Request) == (True, Theirs)


#: Our request class, which Celery imports by its name.
BackoffRequest = symbol_by_name(SQSBackoffTask.Request)


class Ours(BackoffRequest):
    """A company's request class that inherits from ours."""


class Theirs(Request):
    """A company's request class that does not inherit from ours."""


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
    """The app refuses a task whose request class does not inherit from ours.

    Such a class would delete messages that wait for their retry.
    """
    with pytest.raises(ImproperlyConfigured, match=r"mail: invalid Request .* expected a subclass"):
        define(an_app(), Request=request_class)


def test_own_tasks_of_celery():
    """Celery's own tasks keep Celery's settings.

    ``chord_unlock`` retries until its chord is complete. Each of our retries would use up a
    receive of its message.
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
    """If one of Celery's own tasks retries, it publishes a new message as in stock Celery."""
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
    """The app refuses a task if ``classify`` is a factory that the user forgot to call."""
    with pytest.raises(ImproperlyConfigured, match=r"did you mean requests_errors\(\)\?"):
        define(an_app(), classify=requests_errors)


def test_django_setting_name():
    """In a Django project, errors name a setting as it is written in Django's settings."""
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
        pytest.param({"uploads": 3}, id="an adapter that is a number"),
        pytest.param({3: "shop.from_s3"}, id="a queue that is a number"),
    ],
)
def test_invalid_foreign(foreign):
    """The app refuses an invalid ``foreign`` setting.

    The setting maps a queue to the adapter for messages that Celery has not sent.
    """
    app = an_app()
    app.conf.sqs_backoff = {"foreign": foreign}
    with pytest.raises(ImproperlyConfigured, match="invalid foreign"):
        define(app)


def test_table_of_ends():
    """The table in the docstring of ``retry.decision`` has a row for each end of a run."""
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
