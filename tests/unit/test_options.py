"""A task's options: where their values come from, and which values are refused.

An option is refused when the task is defined, with ``ImproperlyConfigured``.
"""

from datetime import timedelta

import pytest
from celery import Celery
from celery.exceptions import ImproperlyConfigured

from celery_sqs_backoff import (
    FullJitter,
    Outcome,
    Provider,
    Schedule,
    SQSBackoffTask,
)


@pytest.fixture
def app():
    return Celery("options", broker="memory://", set_as_current=False)


def define(app, **options):
    @app.task(base=SQSBackoffTask, name="mail", lazy=False, shared=False, **options)
    def mail():
        """Send nothing."""

    return mail


def test_defaults(app):
    """By default a task may be retried for 36 hours, but only for errors that it names."""
    options = define(app).backoff_options
    assert options.backoff == FullJitter(base=2, cap=3600)
    assert options.retry_for == 36 * 3600
    assert options.max_retries is None
    assert options.retry_on == ()
    assert options.on_give_up == "dead-letter"
    assert options.crash_budget == 3


@pytest.mark.parametrize(
    ("option", "value", "legal"),
    [
        ("backoff", 5, "a delay policy"),
        ("backoff", FullJitter, "a delay policy"),
        ("backoff", None, "a delay policy"),
        ("retry_for", -1, "from 0 up"),
        ("retry_for", "36h", "seconds or a timedelta"),
        ("retry_for", float("nan"), "from 0 up"),
        ("retry_for", float("inf"), "None: no limit"),
        ("max_retries", -1, "from 0 up"),
        ("max_retries", 2.5, "a whole number"),
        ("max_retries", True, "a whole number"),
        ("retry_on", "ValueError", "an exception class"),
        ("retry_on", (ValueError, 503), "an exception class"),
        ("retry_on", int, "an exception class"),
        ("retry_on", ValueError("made"), "an exception class"),
        ("classify", "by_status", "a callable"),
        ("classify", (print, 3), "a callable"),
        ("on_not_processed", "unset", "a callable"),
        ("on_give_up", "drop", "'dead-letter' or 'fail'"),
        ("on_give_up", None, "'dead-letter' or 'fail'"),
        ("crash_budget", 0, "from 1 up"),
        ("crash_budget", None, "a whole number"),
        ("fifo_cap", 0, "above 0"),
        ("fifo_cap", None, "above 0"),
        ("park_above", 0, "above 0, up to 1"),
        ("park_above", 80, "above 0, up to 1"),
        ("record_detail", "none", "'full' or 'type'"),
        ("redact", "mask", "a callable (text) -> text"),
    ],
    ids=repr,
)
def test_invalid_option(app, option, value, legal):
    """An invalid option is refused. The error has the option's name and its legal values."""
    with pytest.raises(ImproperlyConfigured) as refused:
        define(app, **{option: value})
    assert str(refused.value).startswith(f"mail: invalid {option} ")
    assert legal in str(refused.value)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("backof", "backoff"), ("retry_onn", "retry_on"), ("crash_budjet", "crash_budget")],
)
def test_misspelt_option(app, wrong, right):
    """A misspelt option is refused. The error has the right name.

    Celery accepts any keyword, so without this check the option would silently do nothing.
    """
    with pytest.raises(ImproperlyConfigured, match=f"{wrong!r}.*did you mean {right!r}"):
        define(app, **{wrong: 1})


BY_ACCOUNT = Provider("mail", key="account_id")
OPTIONS = {"base": SQSBackoffTask, "lazy": False, "shared": False}


def test_key_without_argument(app):
    """A task is refused if the ``key`` of its provider is not one of the task's arguments.

    The key tells the provider's customers apart. Without it, one customer's outage would hold up
    the tasks of all.
    """
    with pytest.raises(ImproperlyConfigured) as refused:

        @app.task(**OPTIONS, name="mail", bind=True, provider=BY_ACCOUNT)
        def send(self, acount_id, text): ...

    assert str(refused.value) == (
        "mail: invalid provider: invalid key 'account_id': the task has no such argument;"
        " expected one of acount_id, text"
    )


def test_key_with_argument(app):
    """A task is accepted if the ``key`` of its provider is one of the task's arguments."""

    @app.task(**OPTIONS, provider=BY_ACCOUNT)
    def plain(text, account_id): ...

    @app.task(**OPTIONS, provider=BY_ACCOUNT, bind=True)
    def bound(self, *, account_id): ...

    @app.task(**OPTIONS, provider=BY_ACCOUNT)
    def any_keywords(**options): ...

    assert plain.backoff_options.provider == BY_ACCOUNT


def test_app_wide_key(app):
    """If the whole app has one provider, a task without the key as an argument is accepted."""
    app.conf.sqs_backoff = {"provider": BY_ACCOUNT}
    assert define(app).backoff_options.provider == BY_ACCOUNT


@pytest.mark.hazard("H7")
def test_acks_late_false(app):
    """``acks_late=False`` is refused, because Celery would delete the message before the run."""
    with pytest.raises(ImproperlyConfigured, match=r"mail: acks_late=False .* acks_late=True"):
        define(app, acks_late=False)


@pytest.mark.hazard("H7")
def test_acks_late_annotation(app):
    """``acks_late=False`` in ``task_annotations`` is refused too."""
    app.conf.task_annotations = {"mail": {"acks_late": False}}
    with pytest.raises(ImproperlyConfigured, match="acks_late"):
        define(app)


def test_unbound_base_class(app):
    """Defining a task binds the task to its app, but not ``SQSBackoffTask`` itself.

    If the base class were bound, all later tasks would share its annotations and request stack.
    """
    other = define(Celery("other", broker="memory://", set_as_current=False))
    assert not SQSBackoffTask.__bound__
    assert define(app).request_stack is not other.request_stack


@pytest.mark.parametrize("value", [90, 90.0, timedelta(seconds=90)], ids=repr)
def test_option_times(app, value):
    """An option that is a time accepts seconds or a timedelta."""
    options = define(app, retry_for=value, fifo_cap=value).backoff_options
    assert (options.retry_for, options.fifo_cap) == (90, 90)


def test_single_value(app):
    """``retry_on`` and ``classify`` accept a single class or callable instead of a tuple."""

    def by_status(exc):
        return Outcome.RETRYABLE

    options = define(app, retry_on=OSError, classify=by_status).backoff_options
    assert options.retry_on == (OSError,)
    assert options.classify == (by_status,)


def test_precedence(app):
    """The task's options override the app's, which override the defaults."""
    app.conf.sqs_backoff = {"retry_for": 60, "max_retries": 7, "backoff": Schedule([5])}
    options = define(app, retry_for=timedelta(minutes=2)).backoff_options
    assert options.retry_for == 120
    assert options.max_retries == 7
    assert options.backoff == Schedule([5])
    assert options.crash_budget == 3


def test_reset_to_default(app):
    """A task may set an app-wide option back to its default."""
    app.conf.sqs_backoff = {"max_retries": 7}
    task = define(app, max_retries=None)
    assert task.backoff_options.max_retries is None
    assert task.max_retries is None


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"retry_four": 60}, r"'retry_four' \(did you mean 'retry_for'"),
        (["retry_for"], "expected a dict of"),
        ({"retry_for": -1}, "mail: sqs_backoff: invalid retry_for -1"),
    ],
    ids=["unknown", "a list", "invalid"],
)
def test_invalid_app_option(app, given, error):
    """An invalid app-wide option is refused when a task is defined."""
    app.conf.sqs_backoff = given
    with pytest.raises(ImproperlyConfigured, match=error):
        define(app)


def test_intermediate_class(app):
    """A task inherits the options of its base classes, which override the app's options."""

    class MailTask(SQSBackoffTask):
        abstract = True
        retry_on = (OSError,)
        retry_for = 60

    class UrgentMailTask(MailTask):
        abstract = True
        retry_for = 10

    app.conf.sqs_backoff = {"retry_for": 5, "crash_budget": 9}

    @app.task(base=UrgentMailTask, lazy=False, shared=False)
    def urgent():
        """Send nothing."""

    options = urgent.backoff_options
    assert (options.retry_on, options.retry_for, options.crash_budget) == ((OSError,), 10, 9)
