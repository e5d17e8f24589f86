"""Find out from a traceback whether an HTTP library had sent the request when it raised an error.

The class of some errors does not show this. A timeout has the same class while a client connects
and while it waits for an answer, but the tracebacks differ. A traceback can only prove that the
request was not sent. Without this proof, the provider may have processed the request.
"""

from __future__ import annotations

from collections.abc import Iterator
from ssl import SSLCertVerificationError
from traceback import walk_tb
from types import FrameType

# gevent and eventlet replace the modules socket and ssl by modules of their own.
_SOCKETS = ("socket", "ssl", "gevent", "eventlet")


def frames(exc: BaseException) -> Iterator[tuple[str, str, FrameType]]:
    """Yield module, function and frame of each call in the error's traceback, outermost first."""
    for frame, _ in walk_tb(exc.__traceback__):
        yield str(frame.f_globals.get("__name__", "")), frame.f_code.co_name, frame


def list_functions(exc: BaseException, module: str) -> set[str]:
    """Return the names of the functions of ``module`` that are in the error's traceback."""
    return {function for name, function, _ in frames(exc) if name == module}


def iter_wrapped(exc: BaseException) -> Iterator[BaseException]:
    """Yield the error, and the errors that urllib3, requests, urllib and botocore wrapped in it.

    The libraries keep the wrapped errors in ``args``, ``reason``, ``kwargs["error"]`` or
    ``__cause__``. An error in ``__context__`` is left out, because it may be unrelated.
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
    """Return whether the error was raised while the library connected to the server.

    Connecting includes a proxy's tunnel and the TLS handshake. The library sends the request only
    after them.
    """
    return any(
        _connects(module, function) for e in iter_wrapped(exc) for module, function, _ in frames(e)
    )


def was_tried_before(exc: BaseException) -> bool:
    """Return whether urllib3 or stripe may have sent the request in an earlier attempt.

    Both libraries retry, and raise only the error of the last attempt. The provider may have
    processed an earlier attempt even if the last attempt got no connection.
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
    """Return whether the request of an attempt may have been sent.

    It was not sent if the attempt failed while connecting. ``error`` is the attempt's error, or
    ``None`` if the server answered with a status.
    """
    return error is None or not (
        any(type(e).__name__ in _NO_CONNECTION for e in iter_wrapped(error))
        or before_the_request(error)
    )


#: Errors that urllib3 raises if it got no connection, so that it sent no request.
_NO_CONNECTION = ("NewConnectionError", "NameResolutionError", "ConnectTimeoutError")

#: OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED. These errors end when
#: the certificate becomes valid or is renewed.
#: (https://docs.openssl.org/3.0/man3/X509_STORE_CTX_get_error/)
_PASSING = (9, 10)


def certificate_failed(exc: BaseException) -> bool:
    """Return whether the client refused the provider's certificate, and so sent no request."""
    return any(isinstance(error, SSLCertVerificationError) for error in iter_wrapped(exc))


def certificate_rejected(exc: BaseException) -> bool:
    """Return whether the client refused the certificate for a lasting reason, such as a wrong name.

    A retry does not help after such a refusal. An expired certificate does not count, because it
    will be renewed. A certificate that is not valid yet does not count either.
    """
    return any(
        isinstance(error, SSLCertVerificationError) and error.verify_code not in _PASSING
        for error in iter_wrapped(exc)
    )


def had_sent_other_mails(exc: BaseException) -> bool:
    """Return whether Django's ``send_mass_mail`` had already sent other mails in the same call.

    The backends of Django (SMTP) and django-anymail send one mail after another and count them.
    This function reads the count from the traceback.
    """
    return any(
        function == "send_messages"
        and module in ("django.core.mail.backends.smtp", "anymail.backends.base")
        and frame.f_locals.get("num_sent")
        for module, function, frame in frames(exc)
    )


def proxy_wants_credentials(exc: BaseException) -> bool:
    """Return whether a proxy required credentials (407). A retry would fail in the same way."""
    return any("407 Proxy Auth" in str(error) for error in iter_wrapped(exc))


def _connects(module: str, function: str) -> bool:
    if function == "_tunnel":
        return module in ("http.client", "urllib3.connection")
    return module.partition(".")[0] in _SOCKETS and function in (
        "create_connection",
        "do_handshake",
    )
