"""Find out where an HTTP library was when it raised an error.

Some errors do not show that themselves. A timeout has the same class while a client connects and
while it waits for an answer, but the tracebacks differ. A traceback proves one thing only, that the
request had not left. Without a traceback a failure stays in doubt.
"""

from __future__ import annotations

from collections.abc import Iterator
from ssl import SSLCertVerificationError
from traceback import walk_tb
from types import FrameType

# gevent and eventlet bring their own socket and ssl modules.
_SOCKETS = ("socket", "ssl", "gevent", "eventlet")


def frames(exc: BaseException) -> Iterator[tuple[str, str, FrameType]]:
    """Yield module, function and frame of each call that the error passed, the outermost first."""
    for frame, _ in walk_tb(exc.__traceback__):
        yield str(frame.f_globals.get("__name__", "")), frame.f_code.co_name, frame


def list_functions(exc: BaseException, module: str) -> set[str]:
    """Return the names of the functions of a module that the error passed."""
    return {function for name, function, _ in frames(exc) if name == module}


def iter_wrapped(exc: BaseException) -> Iterator[BaseException]:
    """Yield the error, and the errors that urllib3, requests, urllib and botocore wrapped in it.

    The libraries keep them in ``args``, ``reason``, ``kwargs["error"]`` or ``__cause__``. An error
    in ``__context__`` is left out, because it need not be the reason.
    """
    waiting: list[object] = [exc]
    seen: set[int] = set()
    while waiting:
        error = waiting.pop()
        if not isinstance(error, BaseException) or id(error) in seen:
            continue
        seen.add(id(error))
        yield error
        kwargs = getattr(error, "kwargs", None)
        waiting += [
            *error.args,
            getattr(error, "reason", None),
            kwargs.get("error") if isinstance(kwargs, dict) else None,
            error.__cause__,
        ]


def before_the_request(exc: BaseException) -> bool:
    """Return whether a connection, a proxy's tunnel or a TLS handshake failed."""
    return any(
        _connects(module, function) for e in iter_wrapped(exc) for module, function, _ in frames(e)
    )


def was_tried_before(exc: BaseException) -> bool:
    """Return whether urllib3 or stripe had sent the request before, by retries of their own.

    The error belongs to the last attempt only. That attempt may have been refused a connection
    after an earlier one had reached the provider.
    """
    return any(
        _was_tried(module, f, frame) for e in iter_wrapped(exc) for module, f, frame in frames(e)
    )


def _was_tried(module: str, function: str, frame: FrameType) -> bool:
    if (module, function) == ("urllib3.connectionpool", "urlopen"):
        history = getattr(frame.f_locals.get("retries"), "history", None) or ()
        return any(was_sent(getattr(attempt, "error", None)) for attempt in history)
    if module.startswith("stripe.") and "request_with_retries" in function:
        return bool(frame.f_locals.get("num_retries"))
    return False


def was_sent(error: BaseException | None) -> bool:
    """Return whether an attempt left, because it ended with a status or not while connecting."""
    return error is None or not (
        any(type(e).__name__ in _NO_CONNECTION for e in iter_wrapped(error))
        or before_the_request(error)
    )


#: Errors of urllib3 for attempts that were not sent.
_NO_CONNECTION = ("NewConnectionError", "NameResolutionError", "ConnectTimeoutError")

#: OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED. Time or the provider
#: ends these. (https://docs.openssl.org/3.0/man3/X509_STORE_CTX_get_error/)
_PASSING = (9, 10)


def certificate_failed(exc: BaseException) -> bool:
    """Return whether the client refused the provider's certificate, and so sent no request."""
    return any(isinstance(error, SSLCertVerificationError) for error in iter_wrapped(exc))


def certificate_rejected(exc: BaseException) -> bool:
    """Return whether the provider's certificate cannot be trusted (name, unknown authority).

    No later attempt will help. An expired certificate does not count, because it will be renewed.
    """
    return any(
        isinstance(error, SSLCertVerificationError) and error.verify_code not in _PASSING
        for error in iter_wrapped(exc)
    )


def after_another_mail(exc: BaseException) -> bool:
    """Return whether one call of Django's ``send_mass_mail`` had sent mails before this one.

    Django's SMTP backend and django-anymail's send one mail after the other, and count them.
    """
    return any(
        function == "send_messages"
        and module in ("django.core.mail.backends.smtp", "anymail.backends.base")
        and frame.f_locals.get("num_sent")
        for module, function, frame in frames(exc)
    )


def proxy_wants_credentials(exc: BaseException) -> bool:
    """Return whether a proxy refused its tunnel with 407, which no later attempt will change."""
    return any("407 Proxy Auth" in str(error) for error in iter_wrapped(exc))


def _connects(module: str, function: str) -> bool:
    if function == "_tunnel":
        return module in ("http.client", "urllib3.connection")
    return module.partition(".")[0] in _SOCKETS and function in (
        "create_connection",
        "do_handshake",
    )
