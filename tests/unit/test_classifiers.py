"""The classifiers' tables of errors: complete, and harmless if a library is not installed."""

from __future__ import annotations

import smtplib
import subprocess
import sys
from types import SimpleNamespace

import botocore.exceptions
import pytest
import stripe

from celery_sqs_backoff import classifiers
from celery_sqs_backoff.classifiers.exchange import Diagnosis, find
from celery_sqs_backoff.retry.outcomes import Outcome, Verdict
from tests.support.cases import cases
from tests.support.verdicts import REPEATED, shown
from tests.tables import LIBRARIES

FACTORIES = [getattr(classifiers, name) for name in classifiers.__all__]


@pytest.mark.parametrize("library", LIBRARIES)
def test_names_of_tables(library):
    """Each error that a library's table names exists in the newest version of the library."""
    assert stripe  # the table of SDKs finds its errors only if the SDK is imported
    if library == "botocore" and not hasattr(botocore.exceptions, "LoginError"):
        pytest.skip("an older botocore, in the tests of the lowest versions, has fewer errors")
    for rule in LIBRARIES[library]:
        assert len(list(rule.classes())) == len(rule.names.split()), rule


@pytest.mark.parametrize("library", LIBRARIES)
def test_dropped_rules(library):
    """If any rule of a table is removed, no error in doubt becomes RETRYABLE."""
    table = LIBRARIES[library]
    for error in {error for rule in table for error in rule.classes()}:
        exc = error.__new__(error)
        exc.__dict__.update(response={}, file=None, smtp_error="", smtp_code=None, recipients={})
        if outcome_of(find(table, exc)) is Outcome.UNKNOWN:
            for dropped in table:
                others = tuple(rule for rule in table if rule is not dropped)
                assert outcome_of(find(others, exc)) is not Outcome.RETRYABLE, (dropped, error)


def outcome_of(finding: Diagnosis | None) -> Outcome:
    """Return the outcome of a diagnosis. Without a diagnosis, the outcome is in doubt."""
    return Outcome.UNKNOWN if finding is None else finding.meaning.outcome()


def test_absent_libraries():
    """The classifiers work although none of the libraries that they know can be imported."""
    program = """
import sys
import celery_sqs_backoff
absent = "requests httpx urllib3 botocore stripe".split()
sys.modules.update(dict.fromkeys(absent))  # importing them raises ImportError from now on
from celery_sqs_backoff.classifiers import known_errors
class Refused(Exception):
    status_code = 429
Refused.__module__ = "twilio.base"
print(known_errors()(ConnectionRefusedError()), known_errors()(Refused()).outcome.name)
"""
    answer = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert answer.stdout == "None RETRYABLE\n"


@pytest.mark.parametrize("factory", FACTORIES, ids=lambda factory: factory.__name__)
def test_idempotent_not_bool(factory):
    """Each classifier refuses an ``idempotent`` that is neither True nor False."""
    assert callable(factory)
    for nonsense in ("yes", 1, None):
        with pytest.raises(TypeError, match="idempotent"):
            factory(idempotent=nonsense)


@pytest.mark.parametrize("factory", FACTORIES, ids=lambda factory: factory.__name__)
@pytest.mark.parametrize(
    "exc",
    [ValueError("no"), OSError(), TimeoutError(), ConnectionResetError(), KeyboardInterrupt()],
)
def test_foreign_error(factory, exc):
    """A classifier returns None for an error that its library did not raise."""
    assert callable(factory)
    assert factory(idempotent=True)(exc) is None


def test_repr():
    """The repr of a classifier shows its name and options."""
    assert repr(classifiers.httpx_errors(idempotent=True)) == "httpx_errors(idempotent=True)"


class SDKError(Exception):
    """An error of an SDK that the user named in ``sdk_errors(modules=...)``."""

    def __init__(self, **attributes: object) -> None:
        super().__init__("no")
        self.__dict__.update(attributes)


@cases(
    "attributes expected",
    {
        "http_status": ({"http_status": 429}, Outcome.RETRYABLE),
        "status_code": ({"status_code": 401}, Outcome.NOT_PROCESSED),
        "status": ({"status": 500}, Outcome.UNKNOWN),
        "a response": ({"response": SimpleNamespace(status_code=429)}, Outcome.RETRYABLE),
        "a response with status": (
            {"response": SimpleNamespace(status=404)},
            Outcome.NOT_PROCESSED,
        ),
        "no status": ({"http_status": None}, None),
        "a status that is a word": ({"status": "failed"}, None),
        "code, which may mean anything": ({"code": 503}, None),
        "a response that is a dict": ({"response": {"status": 503}}, None),
    },
)
def test_sdk_error(attributes, expected):
    """An SDK's error is classified by its HTTP status."""
    errors = classifiers.sdk_errors(modules=["tests"])
    verdict = errors(SDKError(**attributes))
    assert classifiers.sdk_errors()(SDKError(**attributes)) is None
    assert (verdict.outcome if isinstance(verdict, Verdict) else None) is expected


def test_error_of_project():
    """An exception of the user's project is not taken for an SDK's error.

    Django REST framework may raise a ValidationError after the provider has charged.
    """

    class ValidationError(Exception):
        status_code = 400

    ValidationError.__module__ = "rest_framework.exceptions"
    assert classifiers.known_errors()(ValidationError()) is None


@pytest.mark.parametrize(("accepted", "expected"), [(0, Outcome.RETRYABLE), (1, Outcome.UNKNOWN)])
def test_mass_mail_over_api(accepted, expected):
    """If one of several mails sent in a loop was accepted, a later refusal is in doubt.

    A retry would send the first mail again. The loop is like django-anymail's.
    """
    backend = {"__name__": "anymail.backends.base"}
    loop = """
def send_messages(messages):
    num_sent = 0
    for message in messages:
        if message is not None:
            raise message
        num_sent += 1
"""
    exec(loop, backend)
    error = type("AnymailRequestsAPIError", (SDKError,), {"__module__": "anymail.exceptions"})
    messages = [None] * accepted + [error(status_code=429)]
    with pytest.raises(SDKError) as raised:
        backend["send_messages"](messages)
    for errors in (classifiers.sdk_errors(), classifiers.known_errors()):
        verdict = errors(raised.value)
        assert isinstance(verdict, Verdict)
        assert verdict.outcome is expected


def test_endless_smtp_reply():
    """An SMTP reply that never ends leaves the mail in doubt.

    smtplib reports a 500 then, although the server may have accepted the mail.
    """

    class Endless:
        def sendall(self, data): ...

        def makefile(self, mode):
            return self

        def readline(self, size):
            return replies.pop() if replies else b"2" * size

        def close(self): ...

    replies = [b"354 go\r\n"]
    server = smtplib.SMTP()
    server.sock = Endless()
    with pytest.raises(smtplib.SMTPResponseException) as caught:
        server.data("Hello")
    assert shown(classifiers.smtplib_errors()(caught.value)) is Outcome.UNKNOWN


def test_retry_after_in_response():
    """``Retry-After`` is also read from the error's ``response``, where django-anymail has it."""
    response = SimpleNamespace(status_code=429, headers={"Retry-After": "120"})
    error = SDKError(status_code=429, response=response)
    assert classifiers.sdk_errors(modules=["tests"])(error) == Verdict(Outcome.RETRYABLE, 120)


@pytest.mark.parametrize(
    ("code", "expected", "if_idempotent"),
    [
        ("TransactionInProgressException", Outcome.UNKNOWN, REPEATED),
        ("DuplicateRequest", Outcome.UNKNOWN, REPEATED),
        ("IdempotentParameterMismatch", Outcome.UNKNOWN, Outcome.UNKNOWN),
        ("KmsThrottled", Outcome.RETRYABLE, Outcome.RETRYABLE),
        ("KMS.ThrottlingException", Outcome.RETRYABLE, Outcome.RETRYABLE),
        ("TransactionConflictException", Outcome.RETRYABLE, Outcome.RETRYABLE),
    ],
)
def test_codes_of_aws(code, expected, if_idempotent):
    """AWS's error code decides the outcome, together with ``idempotent``."""
    error = botocore.exceptions.ClientError(
        {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": 400}}, "Call"
    )
    found = [classifiers.botocore_errors(idempotent=i)(error) for i in (False, True)]
    assert [shown(verdict) for verdict in found] == [expected, if_idempotent]
