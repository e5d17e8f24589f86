"""What is wrong with how tasks are retried. Needs the app alone."""

from __future__ import annotations

from collections.abc import Iterator

from ..facts import Facts
from ..finding import Fix, Report, Rule

__all__ = ["RULES"]

#: Classes that say nothing about whether the work was done.
_BROAD = frozenset(
    {
        "builtins.BaseException",
        "builtins.Exception",
        "requests.exceptions.RequestException",
        "httpx.HTTPError",
        "httpx.RequestError",
        "botocore.exceptions.BotoCoreError",
        "botocore.exceptions.ClientError",
        "aiohttp.client_exceptions.ClientError",
        "smtplib.SMTPException",
        "urllib.error.URLError",
    }
)


def _without_base_class(facts: Facts) -> Iterator[Report]:
    if not facts.covered:
        return  # an app that does not use the package yet
    for task in facts.app.tasks:
        if task.is_covered:
            continue
        how = (
            "Celery publishes a copy for each retry"
            if task.autoretries
            else (
                "with acks_late its message is run again when the visibility timeout ends"
                if task.acks_late
                else "its message is deleted before it runs"
            )
        )
        yield (
            task.name,
            "its base class is not SQSBackoffTask",
            f"Nothing here applies to it: {how}, and no dead letter says why it failed.",
            Fix(text="Add base=SQSBackoffTask, or set task_cls of the Celery app."),
        )


def _broad(facts: Facts) -> Iterator[Report]:
    for task in facts.covered:
        broad = sorted(_BROAD.intersection(task.retried_errors))
        if broad:
            yield (
                task.name,
                f"retries {', '.join(broad)}; expected errors after which nothing was processed",
                "A timeout after the request left is retried too: a mail goes out twice, a card is"
                " charged twice.",
                Fix(text="Name the errors, or use a classifier (celery_sqs_backoff.classifiers)."),
            )


RULES = (
    Rule(
        "W019",
        "A task is not covered",
        "Tasks without the base class keep Celery's behaviour on SQS: retries are copies with a new"
        " message id, and the dead-letter queue is never used.",
        _without_base_class,
        is_live=False,
    ),
    Rule(
        "W020",
        "A task retries errors that may mean that it was processed",
        "Retryable is an allow list. A base class such as Exception or RequestException covers"
        " invalid addresses, refusals for good, and timeouts after the request left.",
        _broad,
        is_live=False,
    ),
)
