"""Classify the errors of botocore and boto3.

https://docs.aws.amazon.com/boto3/latest/guide/error-handling.html
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from ..retry.outcomes import Classifier
from .answers import answer, read_asked_seconds
from .exchange import Diagnosis, ErrorRule, LibraryErrors, Meaning
from .urllib import nothing_was_sent

_rule = partial(ErrorRule, "botocore.exceptions")

#: Codes of throttled requests, and of requests that arrived too late. Most of these answers
#: have the status 400.
#: https://docs.aws.amazon.com/boto3/latest/guide/retries.html#standard-retry-mode
THROTTLING_CODES = frozenset(
    (
        *("BandwidthLimitExceeded", "EC2ThrottledException", "LimitExceededException"),
        *("KMS.ThrottlingException", "KMSThrottlingException", "KmsThrottled"),
        *("PriorRequestNotComplete", "ProvisionedThroughputExceededException"),
        *("ReplicatedWriteConflictException", "TransactionConflictException"),
        *("RequestLimitExceeded", "RequestThrottled", "RequestThrottledException"),
        *("RequestTimeout", "RequestTimeoutException", "SlowDown", "TooManyRequestsException"),
        *("ThrottledException", "Throttling", "ThrottlingError", "ThrottlingException"),
    )
)

#: Codes which say that the service is still processing an earlier attempt with the same idempotency
#: token.
#: https://docs.aws.amazon.com/amazondynamodb/latest/APIReference/API_TransactWriteItems.html
#: https://docs.aws.amazon.com/Route53/latest/APIReference/API_domains_RegisterDomain.html
IN_PROGRESS_CODES = frozenset({"DuplicateRequest", "TransactionInProgressException"})

#: Codes which say that the same idempotency token was used for another request, which may have been
#: processed.
CONFLICT_CODES = frozenset({"IdempotentParameterMismatch", "IdempotentParameterMismatchException"})

#: Codes of expired temporary credentials. The client renews them, so a retry may succeed.
#: https://docs.aws.amazon.com/STS/latest/APIReference/CommonErrors.html
EXPIRED_CODES = frozenset({"ExpiredToken", "ExpiredTokenException", "RequestExpired"})


#: Codes of a 503 that comes from the service itself, and not from a gateway before it.
_OWN_503 = frozenset({"ServiceUnavailable", "ServiceUnavailableException"})


def _code(exc: Any) -> str | None:
    code = _part(exc, "Error").get("Code")
    return code if isinstance(code, str) else None


def _part(exc: Any, name: str) -> dict[str, Any]:
    """Return a part of the parsed response, or an empty dict if a stub or proxy left it out."""
    part = exc.response.get(name) if isinstance(exc.response, dict) else None
    return part if isinstance(part, dict) else {}


def _read_status(exc: Any) -> Diagnosis | None:
    metadata = _part(exc, "ResponseMetadata")
    found = answer(metadata.get("HTTPStatusCode"), metadata.get("HTTPHeaders"), now=time.time())
    if found is not None and found.meaning is Meaning.UNAVAILABLE and _code(exc) in _OWN_503:
        return Diagnosis(Meaning.REFUSED_FOR_NOW, found.retry_after_seconds)
    return found


def _read_wait(exc: Any) -> float | None:
    return read_asked_seconds(_part(exc, "ResponseMetadata").get("HTTPHeaders"), now=time.time())


_BROKEN = "ConnectionError SSLError HTTPClientError ConnectionClosedError ReadTimeoutError"

RULES: tuple[ErrorRule, ...] = (
    _rule(
        "ClientError",
        Meaning.REFUSED_FOR_NOW,
        "the code of a throttled or late request",
        lambda exc: _code(exc) in THROTTLING_CODES,
        lambda exc: _read_wait(exc) or 0.0,
    ),
    _rule(
        "ClientError",
        Meaning.REFUSED_FOR_NOW,
        "the code of expired credentials, which are renewed",
        lambda exc: _code(exc) in EXPIRED_CODES,
        _read_wait,
    ),
    _rule(
        "ClientError",
        Meaning.IN_DOUBT,
        "`TransactionInProgressException`, `DuplicateRequest`: an earlier attempt is under way",
        lambda exc: _code(exc) in IN_PROGRESS_CODES,
        _read_wait,
    ),
    _rule(
        "ClientError",
        Meaning.CONFLICT,
        "`IdempotentParameterMismatch`: the token was used for another request",
        lambda exc: _code(exc) in CONFLICT_CODES,
    ),
    _rule("EventStreamError", Meaning.IN_DOUBT, "an error in the middle of a streamed answer"),
    _rule("ClientError", _read_status, "its status decides"),
    _rule(
        "EndpointConnectionError ConnectTimeoutError ProxyConnectionError",
        Meaning.NOT_SENT,
        "DNS, a refused connection, or a timeout while connecting",
    ),
    _rule(
        "CredentialRetrievalError MetadataRetrievalError",
        Meaning.NOT_SENT,
        "the source of credentials did not answer",
    ),
    _rule(
        "NoCredentialsError PartialCredentialsError NoAuthTokenError TokenRetrievalError"
        " SSOError SSOTokenLoadError UnauthorizedSSOTokenError LoginError"
        " LoginAuthorizationCodeError LoginInsufficientPermissions LoginRefreshRequired"
        " LoginTokenLoadError",
        Meaning.REFUSED,
        "no valid credentials to sign the request",
    ),
    _rule("ParamValidationError", Meaning.REFUSED, "botocore refuses to send the request"),
    _rule(_BROKEN, Meaning.NOT_SENT, "the TLS handshake", nothing_was_sent),
    _rule(
        f"{_BROKEN} ResponseStreamingError IncompleteReadError",
        Meaning.IN_DOUBT,
        "a reset, a timeout or an incomplete answer after the first byte was sent",
    ),
)


def botocore_errors(*, idempotent: bool = False) -> Classifier:
    """Return a classifier for the errors of botocore, which boto3 raises, too.

    botocore itself repeats a call after a timeout, by default with five attempts in all, and
    reports only the last failure. For a call that must not be made twice, switch repetitions off:
    ``Config(retries={"total_max_attempts": 1})``.

    Args:
        idempotent: ``True`` = a second call does no harm, so a failure after the request was sent
            is retried, and ``on_not_processed`` is not called. Default ``False``.

    Raises:
        TypeError: ``idempotent`` is not a bool.
    """
    return LibraryErrors("botocore", RULES, idempotent)
