"""A task may set Celery's ``autoretry_for`` and related options instead of ours."""

import pytest
from celery import Celery

from celery_sqs_backoff import Exponential, FullJitter, Schedule, SQSBackoffTask


def options_of(**given):
    app = Celery("autoretry", broker="memory://", set_as_current=False)

    @app.task(base=SQSBackoffTask, lazy=False, shared=False, **given)
    def mail():
        """Send nothing."""

    return mail.backoff_options


def test_dont_autoretry_for():
    """Errors in ``autoretry_for`` are retried, and errors in ``dont_autoretry_for`` are not."""
    options = options_of(autoretry_for=(OSError,), dont_autoretry_for=(TimeoutError,))
    assert (options.retry_on, options.never_retry) == ((OSError,), (TimeoutError,))


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ({}, Schedule([180])),
        ({"default_retry_delay": 7}, Schedule([7])),
        ({"retry_kwargs": {"countdown": 5}}, Schedule([5])),
        ({"retry_backoff": True}, FullJitter(base=1, cap=600)),
        ({"retry_backoff": 4}, FullJitter(base=4, cap=600)),
        ({"retry_backoff": 4, "retry_backoff_max": 60}, FullJitter(base=4, cap=60)),
        ({"retry_backoff": 4, "retry_jitter": False}, Exponential(base=4, cap=600)),
        ({"retry_backoff": 0.5}, FullJitter(base=1, cap=600)),
        ({"retry_backoff": 700}, FullJitter(base=600, cap=600)),
        ({"backoff": Schedule([3]), "retry_backoff": True}, Schedule([3])),
    ],
    ids=repr,
)
def test_delays_of_celery(given, policy):
    """With Celery's options, the delays are Celery's too, unless the task sets ``backoff``."""
    assert options_of(autoretry_for=(OSError,), **given).backoff == policy


@pytest.mark.parametrize("retries", [0, 5, None])
def test_retry_kwargs(retries):
    """``max_retries`` in ``retry_kwargs`` limits the retries."""
    given = {"autoretry_for": (OSError,), "retry_kwargs": {"max_retries": retries}}
    assert options_of(**given).max_retries == retries


def test_own_options_first():
    """If a task sets both, our options take precedence over Celery's autoretry options."""
    options = options_of(
        autoretry_for=(OSError,),
        retry_on=(KeyError,),
        max_retries=2,
        retry_kwargs={"max_retries": 9},
    )
    assert options.retry_on == (KeyError,)
    assert options.max_retries == 2


@pytest.mark.parametrize("option", ["retry_backoff", "retry_jitter"])
def test_no_autoretry_for(option):
    """Celery's other autoretry options have no effect without ``autoretry_for``."""
    assert options_of(**{option: True}).backoff == FullJitter()


@pytest.mark.hazard("H1")
def test_no_celery_wrapper():
    """Celery's autoretry does not wrap the ``run`` method of a task with our class.

    Its wrapper publishes a copy of the message at each failure (celery/app/autoretry.py).
    """
    app = Celery("autoretry", broker="memory://", set_as_current=False)

    @app.task(base=SQSBackoffTask, lazy=False, shared=False, autoretry_for=(OSError,), bind=True)
    def mail(self):
        raise OSError("as it is")

    assert mail._orig_run is None
    with pytest.raises(OSError, match="as it is"):
        mail()
