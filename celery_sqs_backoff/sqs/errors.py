"""Classifies each error of a call to SQS by its meaning for the caller.

Every exception gets a kind, because botocore raises more than its own classes (a ``RuntimeError``
for credentials that stay expired, an ``OSError`` for a token file that is missing).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from botocore import exceptions as botocore

from ..traces import before_the_request, certificate_failed, list_functions


class CredentialsNotRenewed(botocore.CredentialRetrievalError):
    """The source of the credentials, such as STS, refuses or does not answer. A later try may work.

    Arguments:
        provider: botocore's name of the source.
        error_msg: the source's error code, the name of the exception, or a short reason.
    """

    def __init__(self, *, provider: str, error_msg: str) -> None:
        super().__init__(provider=provider, error_msg=error_msg)
        self.code = f"{type(self).__name__} ({error_msg})"


class Blame(Enum):
    """The cause of a failure, which decides when to try again."""

    #: SQS, the network or the credentials. The failure may pass by itself.
    PASSING = "passing"
    #: The set-up. An operator has to act.
    OPERATOR = "operator"
    #: One entry of a batch. It may also make the whole call fail.
    ENTRY = "entry"


class Kind(Enum):
    """Meaning of a failed call, or of a failed entry of a batch."""

    #: SQS or a proxy asks for fewer calls. The call had no effect.
    THROTTLED = "throttled", Blame.PASSING
    #: SQS was not reached (DNS, refused connection, TLS). Nothing was done.
    UNREACHABLE = "unreachable", Blame.PASSING
    #: The response was lost, or SQS had an internal error. SQS may have carried out the call.
    IN_DOUBT = "in doubt", Blame.PASSING
    #: The credentials have expired, or could not be fetched. The call had no effect.
    CREDENTIALS = "credentials", Blame.PASSING
    #: The source of newer credentials refuses or does not answer. SQS was not called.
    CREDENTIALS_LATE = "late credentials", Blame.PASSING
    #: Permissions are missing, or a KMS key is in a wrong state. Nothing was done.
    DENIED = "denied", Blame.OPERATOR
    #: There is no such queue.
    NO_QUEUE = "no queue", Blame.OPERATOR
    #: The receipt handle is void: the message is deleted, or another consumer has it.
    STALE_HANDLE = "stale handle", Blame.ENTRY
    #: The message would be hidden for more than 12 hours after its receive.
    TOO_LONG = "too long", Blame.ENTRY
    #: SQS refuses this entry for its size, its characters or its attributes.
    BAD_ENTRY = "bad entry", Blame.ENTRY
    #: The server does not know this call. Only local servers say so.
    UNSUPPORTED = "unsupported", Blame.OPERATOR
    #: Repeating the call will not help. The call did not leave this machine (no credentials, no
    #: Region, a bug), or the server refused it with a 4xx status of unknown meaning.
    LOCAL = "local", Blame.OPERATOR

    def __init__(self, _: str, blame: Blame) -> None:
        self.blame = blame


class Operation(Enum):
    """The SQS actions that the package calls. Each value is the name in SQS's API."""

    RECEIVE = "ReceiveMessage"
    CHANGE_VISIBILITY = "ChangeMessageVisibilityBatch"
    DELETE = "DeleteMessageBatch"
    SEND = "SendMessageBatch"
    GET_ATTRIBUTES = "GetQueueAttributes"
    GET_URL = "GetQueueUrl"
    LIST_QUEUES = "ListQueues"
    LIST_SOURCES = "ListDeadLetterSourceQueues"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call, or one entry of a batch, did not succeed.

    Attributes:
        kind: the meaning of the failure.
        code: SQS's error code without its namespace, or the exception's name. Never an error's
            text.
        is_of_call: whether the whole call failed, and not only one entry.
    """

    kind: Kind
    code: str
    is_of_call: bool = False

    @property
    def is_transient(self) -> bool:
        """Whether the same call may succeed later by itself."""
        return self.kind.blame is Blame.PASSING

    @property
    def is_of_lane(self) -> bool:
        """Whether the whole call failed for a reason outside its entries.

        If so, the worker pauses the lane, which is all calls of this operation on the queue.
        """
        return self.is_of_call and self.kind.blame is not Blame.ENTRY

    @property
    def may_have_been_done(self) -> bool:
        """Whether SQS may have carried the call out although it failed."""
        return self.kind is Kind.IN_DOUBT

    @property
    def newer_credentials_may_help(self) -> bool:
        """Whether the call may succeed with newer credentials."""
        return self.kind is Kind.CREDENTIALS or self.code in _SIGNED_WRONGLY

    def __str__(self) -> str:
        return self.code


#: The response does not list the entry, not even as failed. For example, a proxy may have sent an
#: empty response with status 200.
NOT_LISTED = Failure(Kind.IN_DOUBT, "NotListed")

#: The kind of each error code of SQS. The codes are from the error lists of the actions above, and
#: from https://docs.aws.amazon.com/AWSSimpleQueueService/latest/APIReference/CommonErrors.html
#: In these lists, an error of KMS has a code such as ``KmsThrottled``. botocore reports the code of
#: SQS's older protocol, such as ``KMS.ThrottlingException``. The table has both, without ``KMS.``.
KINDS: Mapping[str, Kind] = {
    code: kind
    for kind, codes in {
        Kind.THROTTLED: (
            "BandwidthLimitExceeded KmsThrottled LimitExceededException OverLimit"
            " RequestLimitExceeded RequestThrottled RequestThrottledException SlowDown"
            " ThrottledException Throttling ThrottlingException TooManyRequestsException"
        ),
        Kind.CREDENTIALS: (
            "ExpiredToken ExpiredTokenException RequestExpired InvalidClientTokenId"
            " UnrecognizedClientException CredentialRetrievalError MetadataRetrievalError"
            " TokenRetrievalError RefreshWithMFAUnsupportedError"
        ),
        Kind.CREDENTIALS_LATE: "CredentialsNotRenewed",
        Kind.DENIED: (
            "AccessDenied AccessDeniedException AuthFailure DisabledException IncompleteSignature"
            " InvalidKeyUsageException InvalidSignatureException InvalidStateException"
            " KmsAccessDenied KmsDisabled KmsInvalidKeyUsage KmsInvalidState KmsNotFound"
            " KmsOptInRequired MissingAuthenticationToken NotAuthorized NotFoundException"
            " OptInRequired SignatureDoesNotMatch InvalidSecurity"
        ),
        Kind.NO_QUEUE: "NonExistentQueue QueueDoesNotExist QueueDeletedRecently InvalidAddress",
        Kind.STALE_HANDLE: "MessageNotInflight ReceiptHandleIsInvalid",
        Kind.BAD_ENTRY: (
            "BatchRequestTooLong InvalidMessageContents InvalidAttributeValue MessageTooLong"
        ),
        Kind.UNSUPPORTED: "InvalidAction UnsupportedOperation UnknownOperationException",
        Kind.IN_DOUBT: "InternalError InternalFailure InternalServerError ServiceUnavailable",
    }.items()
    for code in codes.split()
}

#: Codes by which SQS refuses a signature, for example after a rotation of keys.
_SIGNED_WRONGLY = (
    *("AuthFailure", "IncompleteSignature", "InvalidSecurity", "InvalidSignatureException"),
    *("MissingAuthenticationToken", "SignatureDoesNotMatch"),
)

#: In a send, these codes mean a bad entry. In a call with receipt handles, they mean a void handle,
#: or that the message would be hidden for too long.
_PARAMETER_CODES = frozenset({"InvalidParameterValue", "InvalidParameterValueException"})

#: Errors from before the request was sent. After the errors in ``_IN_DOUBT``, SQS may have carried
#: out the call.
#: https://docs.aws.amazon.com/boto3/latest/guide/error-handling.html
_UNREACHABLE = (
    botocore.EndpointConnectionError,
    botocore.ConnectTimeoutError,
    botocore.ProxyConnectionError,
)
_IN_DOUBT = (
    botocore.HTTPClientError,
    botocore.ConnectionError,
    botocore.ResponseStreamingError,
    botocore.IncompleteReadError,
)
_CREDENTIALS = (
    botocore.CredentialRetrievalError,
    botocore.MetadataRetrievalError,
    botocore.TokenRetrievalError,
)
#: Errors while botocore signs a request, for example because a role has expired, or because a token
#: file is just being replaced.
_WHILE_SIGNING = (RuntimeError, OSError)

#: Part of SQS's error text if a message would be hidden for more than 12 hours after its receive.
_BEYOND_12_HOURS = "beyond the limit"


def failure_of(exc: BaseException, operation: Operation) -> Failure:
    """Return the failure for an exception of a call. Never raises.

    Arguments:
        exc: the exception of the call.
        operation: the call. The meaning of some codes depends on it.
    """
    if isinstance(exc, botocore.ClientError):
        return _of_response(exc, operation)
    return Failure(_kind_of_exception(exc), code_of(exc), is_of_call=True)


def code_of(exc: BaseException) -> str:
    """Return an AWS error's code without its namespace, or the name of another exception."""
    if isinstance(exc, botocore.ClientError):
        error = _mapping(_mapping(exc.response).get("Error"))
        return str(error.get("Code", "Unknown")).rpartition(".")[2].rpartition("#")[2]
    return exc.code if isinstance(exc, CredentialsNotRenewed) else type(exc).__name__


#: Advice for an operator, by the error's code or else by its kind.
_ADVICE: Mapping[str | Kind, str] = {
    "NoCredentialsError": "Set AWS_PROFILE or AWS_ACCESS_KEY_ID, or run where a role is attached.",
    "NoRegionError": "Set region in broker_transport_options, or AWS_DEFAULT_REGION.",
    "NotInPredefinedQueues": "Check the queue's name, or add it to predefined_queues.",
    Kind.THROTTLED: "Try again in a minute.",
    Kind.UNREACHABLE: "Check the network, and the Region and endpoint in the app's settings.",
    Kind.IN_DOUBT: "Try again in a minute.",
    Kind.CREDENTIALS: "Renew the credentials.",
    Kind.CREDENTIALS_LATE: "Check the source of the credentials, such as STS.",
    Kind.DENIED: (
        "SQS refused the call. Allow the call to this identity, or check whose credentials are in"
        " use."
    ),
    Kind.NO_QUEUE: "Check the queue's name, its account and its Region.",
    Kind.LOCAL: "Check the app's credentials, Region and broker_transport_options.",
}


def advice(code: str) -> str:
    """Return one sentence of advice about an error for an operator.

    Arguments:
        code: the code of a :class:`Failure`. Text after a space is ignored.
    """
    name = code.partition(" ")[0]
    cls = getattr(botocore, name, None)
    kind = KINDS.get(name) or (_kind_of_class(cls) if isinstance(cls, type) else None)
    return _ADVICE.get(name) or _ADVICE[kind or Kind.LOCAL]


def _kind_of_class(cls: type) -> Kind | None:
    if issubclass(cls, _UNREACHABLE):
        return Kind.UNREACHABLE
    if issubclass(cls, CredentialsNotRenewed):
        return Kind.CREDENTIALS_LATE
    if issubclass(cls, _CREDENTIALS):
        return Kind.CREDENTIALS
    return Kind.IN_DOUBT if issubclass(cls, _IN_DOUBT) else None


def _kind_of_exception(exc: BaseException) -> Kind:
    kind = _kind_of_class(type(exc))
    # A TLS error, a timeout or a reset has the same class before and after the request was sent.
    # Only the traceback can show that the request was not sent.
    if kind is Kind.IN_DOUBT and (certificate_failed(exc) or before_the_request(exc)):
        return Kind.UNREACHABLE
    if kind is not None:
        return kind
    passed = list_functions(exc, "botocore.endpoint")
    # If the response has arrived but is malformed, botocore raises the error in
    # ``_do_get_response``. botocore 1.34 raises some of these errors in ``_send_request``.
    if "_do_get_response" in passed or passed == {"make_request", "_send_request"}:
        return Kind.IN_DOUBT
    if isinstance(exc, _WHILE_SIGNING) and not isinstance(exc, botocore.BotoCoreError):
        return Kind.CREDENTIALS
    return Kind.LOCAL


def failure_of_entry(entry: Mapping[str, Any], operation: Operation) -> Failure:
    """Return the failure of one entry in a batch response's ``Failed`` list. Never raises."""
    code = str(entry.get("Code", "Unknown")).rpartition(".")[2]
    kind = _kind(code, str(entry.get("Message", "")), operation)
    if kind is None:
        kind = Kind.BAD_ENTRY if entry.get("SenderFault") else Kind.IN_DOUBT
    return Failure(kind, code)


def _of_response(exc: botocore.ClientError, operation: Operation) -> Failure:
    code, text = code_of(exc), _mapping(_mapping(exc.response).get("Error")).get("Message", "")
    status = _mapping(_mapping(exc.response).get("ResponseMetadata")).get("HTTPStatusCode")
    kind = _kind(code, str(text), operation) or _of_status(status, operation)
    return Failure(kind, code, is_of_call=True)


def _mapping(value: object) -> Mapping[str, Any]:
    """Return a mapping unchanged, and ``{}`` for any other value, as in a malformed response."""
    return value if isinstance(value, Mapping) else {}


def _of_status(status: object, operation: Operation) -> Kind:
    if status == 429:
        return Kind.THROTTLED
    if status == 413 and operation is Operation.SEND:  # a proxy with a limit below SQS's
        return Kind.BAD_ENTRY
    if status in (401, 403):
        return Kind.DENIED
    if isinstance(status, int) and 400 <= status < 500:
        return Kind.LOCAL
    return Kind.IN_DOUBT


def _kind(code: str, text: str, operation: Operation) -> Kind | None:
    if code in _PARAMETER_CODES:
        if operation is Operation.SEND:
            return Kind.BAD_ENTRY
        if _BEYOND_12_HOURS in text:
            return Kind.TOO_LONG
        if operation in (Operation.CHANGE_VISIBILITY, Operation.DELETE):
            return Kind.STALE_HANDLE
        return Kind.LOCAL
    return KINDS.get(code)
