"""Ready classifiers for the errors of the libraries that tasks often call.

Name them in a task's option ``classify``::

    from celery_sqs_backoff.classifiers import requests_errors

    @app.task(base=SQSBackoffTask, bind=True, classify=requests_errors())
    def send_email(self, customer_id):
        requests.post(...).raise_for_status()

Each classifier finds out at which moment of the call the library failed. If the request was not
sent, or the provider refused it only for now, the failure is RETRYABLE. If the provider refused the
request for good, the failure is NOT_PROCESSED. If the request was sent and got no proper answer,
the failure is UNKNOWN. An UNKNOWN failure is retried only if you pass ``idempotent=True``. For an
error of another library, the classifier returns ``None``, and the task's next classifier is called.

A verdict covers only the call that failed, not calls that the task made before.

The classifiers never import a library, and the libraries need not be installed.
"""

from __future__ import annotations

from ..retry.outcomes import Classifier, Outcome, Verdict
from .botocore import botocore_errors
from .httpx import httpx_errors
from .requests import requests_errors
from .sdk import sdk_errors
from .smtplib import smtplib_errors
from .urllib import urllib_errors

__all__ = [
    "botocore_errors",
    "httpx_errors",
    "known_errors",
    "requests_errors",
    "sdk_errors",
    "smtplib_errors",
    "urllib_errors",
]


def known_errors(*, idempotent: bool = False, trust_503: bool = False) -> Classifier:
    """Return a classifier that asks all classifiers of this module in turn, ``sdk_errors`` last.

    Use it for tasks that make one outside call. If only some calls of a task are idempotent, give
    the task one classifier for each library instead.

    Args:
        idempotent: ``True`` = a second call does no harm, so a failure after the request was sent
            is retried, and ``on_not_processed`` is not called. Default ``False``.
        trust_503: ``True`` = a 503 without ``Retry-After`` is RETRYABLE, too. Default ``False``.

    Raises:
        TypeError: ``idempotent`` or ``trust_503`` is not a bool.
    """
    classifiers = (
        requests_errors(idempotent=idempotent, trust_503=trust_503),
        httpx_errors(idempotent=idempotent, trust_503=trust_503),
        botocore_errors(idempotent=idempotent),
        smtplib_errors(idempotent=idempotent),
        urllib_errors(idempotent=idempotent, trust_503=trust_503),
        sdk_errors(idempotent=idempotent, trust_503=trust_503),
    )

    def ask(exc: BaseException) -> Outcome | Verdict | None:
        answers = (classifier(exc) for classifier in classifiers)
        return next((answer for answer in answers if answer is not None), None)

    return ask
