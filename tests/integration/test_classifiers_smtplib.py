"""The classifier knows for smtplib's real errors whether the server may have sent the mail.

A mail is *in doubt* if the server may have sent it. The outcome is UNKNOWN.
"""

from __future__ import annotations

import asyncio
import smtplib
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import trustme
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult

from celery_sqs_backoff.classifiers import known_errors, smtplib_errors
from celery_sqs_backoff.retry.outcomes import Outcome
from tests.integration.django_app import project
from tests.support.cases import cases
from tests.support.http_faults import nobody, silent
from tests.support.verdicts import REPEATED, raised, shown

RETRYABLE, NOT_PROCESSED, UNKNOWN = Outcome.RETRYABLE, Outcome.NOT_PROCESSED, Outcome.UNKNOWN

TIMEOUT_SECONDS = 0.25
MAIL = "Subject: hello\r\n\r\nHello.\r\n"

HANG = "hang"
HANG_UP = "hang up"


class Provider:
    """A mail server made with aiosmtpd. ``replies`` has its reply to each SMTP command."""

    def __init__(self) -> None:
        self.replies: dict[str, str] = {}
        self.delivered = 0

    async def _reply(self, phase: str, server: Any, usual: str) -> str:
        reply = self.replies.get(phase, usual)
        if reply == HANG:
            await asyncio.sleep(4 * TIMEOUT_SECONDS)
        if reply == HANG_UP:
            server.transport.abort()
        return reply

    async def handle_EHLO(  # noqa: N802
        self, server: Any, session: Any, envelope: Any, name: str, usual: list[str]
    ) -> list[str]:
        session.host_name = name
        reply = await self._reply("EHLO", server, usual[-1])
        return [*usual[:-1], reply] if reply == usual[-1] else [reply]

    async def handle_HELO(self, server: Any, session: Any, envelope: Any, name: str) -> str:  # noqa: N802
        return await self._reply("HELO", server, "250 hello")

    async def handle_MAIL(  # noqa: N802
        self, server: Any, session: Any, envelope: Any, address: str, options: list[str]
    ) -> str:
        envelope.mail_from = address
        return await self._reply("MAIL", server, "250 OK")

    async def handle_RCPT(  # noqa: N802
        self, server: Any, session: Any, envelope: Any, address: str, options: list[str]
    ) -> str:
        reply = self.replies.get(address) or await self._reply("RCPT", server, "250 OK")
        if reply.startswith("250"):
            envelope.rcpt_tos.append(address)
        return reply

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:  # noqa: N802
        self.delivered += 1
        return await self._reply("DATA", server, "250 accepted")

    async def handle_QUIT(self, server: Any, session: Any, envelope: Any) -> str:  # noqa: N802
        return await self._reply("QUIT", server, "221 bye")

    def authenticate(self, *args: object) -> AuthResult:
        return AuthResult(success=False, handled=False, message=self.replies["AUTH"])


class _Controller(Controller):
    port: int

    def _trigger_server(self) -> None:
        # aiosmtpd connects to its own port. The kernel has chosen the port, so set it first.
        assert self.server is not None
        self.port = self.server.sockets[0].getsockname()[1]
        super()._trigger_server()


@contextmanager
def running(provider: Provider, **options: Any) -> Iterator[int]:
    controller = _Controller(
        provider,
        hostname="127.0.0.1",
        port=0,
        authenticator=provider.authenticate,
        auth_require_tls=False,
        **options,
    )
    controller.start()
    try:
        yield controller.port
    finally:
        controller.stop()


@pytest.fixture(scope="module")
def _server():
    provider = Provider()
    with running(provider) as port:
        yield provider, port


@pytest.fixture
def provider(_server):
    _server[0].replies.clear()
    _server[0].delivered = 0
    return _server[0]


@pytest.fixture
def port(_server):
    return _server[1]


def send(
    port: int,
    *recipients: str,
    login: bool = False,
    starttls: ssl.SSLContext | None = None,
    host: str = "127.0.0.1",
) -> Any:
    with smtplib.SMTP(host, port, timeout=TIMEOUT_SECONDS) as server:
        if starttls:
            server.starttls(context=starttls)
        if login:
            server.login("user", "password")
        return server.sendmail("shop@example.com", recipients or ("a@example.com",), MAIL)


def outcomes(exc: Exception) -> tuple[Outcome | str | None, ...]:
    """Return the outcome by default, and the outcome if the mail may be sent twice."""
    found = tuple(smtplib_errors(idempotent=idempotent)(exc) for idempotent in (False, True))
    assert found == tuple(known_errors(idempotent=idempotent)(exc) for idempotent in (False, True))
    return tuple(map(shown, found))


def test_refused_connection():
    """A refused connection gives RETRYABLE."""
    exc = raised(send, int(nobody().split(":")[1]))
    assert isinstance(exc, ConnectionRefusedError)
    assert outcomes(exc) == (RETRYABLE, RETRYABLE)


def test_unresolved_name():
    """A name that does not resolve gives RETRYABLE."""
    exc = raised(send, 25, host="smtp.invalid")
    assert isinstance(exc, socket.gaierror)
    assert outcomes(exc) == (RETRYABLE, RETRYABLE)


def test_no_greeting():
    """A server that sends no greeting gives RETRYABLE."""
    with silent() as address:
        exc = raised(send, int(address.split(":")[1]))
    assert isinstance(exc, smtplib.SMTPServerDisconnected)
    assert outcomes(exc) == (RETRYABLE, RETRYABLE)


@cases(
    "greeting error expected",
    {
        "421": (b"421 busy\r\n", smtplib.SMTPConnectError, RETRYABLE),
        "554": (b"554 no service\r\n", smtplib.SMTPConnectError, NOT_PROCESSED),
        "nonsense": (b"nonsense\r\n", smtplib.SMTPConnectError, RETRYABLE),
        "hang up": (b"", smtplib.SMTPServerDisconnected, RETRYABLE),
    },
)
def test_greeting(greeting, error, expected):
    """The server's greeting decides the outcome."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(greeting)

        thread = threading.Thread(target=greet)
        thread.start()
        exc = raised(send, listener.getsockname()[1])
        thread.join()
    assert isinstance(exc, error)
    assert outcomes(exc) == (expected, expected)


@cases(
    "replies error expected",
    {
        "HELO busy": ({"EHLO": "500 no", "HELO": "421 busy"}, smtplib.SMTPHeloError, RETRYABLE),
        "HELO 550": ({"EHLO": "500 no", "HELO": "550 no"}, smtplib.SMTPHeloError, NOT_PROCESSED),
        "MAIL 451": ({"MAIL": "451 busy"}, smtplib.SMTPSenderRefused, RETRYABLE),
        "MAIL 550": ({"MAIL": "550 who"}, smtplib.SMTPSenderRefused, NOT_PROCESSED),
        "RCPT 450": ({"RCPT": "450 full"}, smtplib.SMTPRecipientsRefused, RETRYABLE),
        "RCPT 421": ({"RCPT": "421 bye"}, smtplib.SMTPRecipientsRefused, RETRYABLE),
        "RCPT 550": ({"RCPT": "550 who"}, smtplib.SMTPRecipientsRefused, NOT_PROCESSED),
        "RCPT 550 and 450": (
            {"a@example.com": "550 who", "b@example.com": "450 full"},
            smtplib.SMTPRecipientsRefused,
            RETRYABLE,
        ),
        "AUTH 454": ({"AUTH": "454 later"}, smtplib.SMTPAuthenticationError, RETRYABLE),
        "AUTH 535": ({"AUTH": "535 no"}, smtplib.SMTPAuthenticationError, NOT_PROCESSED),
        "DATA 451": ({"DATA": "451 later"}, smtplib.SMTPDataError, RETRYABLE),
        "DATA 554": ({"DATA": "554 spam"}, smtplib.SMTPDataError, NOT_PROCESSED),
    },
)
def test_reply(provider, port, replies, error, expected):
    """The server's reply decides the outcome."""
    provider.replies = replies
    exc = raised(send, port, "a@example.com", "b@example.com", login="AUTH" in replies)
    assert isinstance(exc, error)
    assert outcomes(exc) == (expected, expected)


def test_no_common_login():
    """A server without a common way to log in gives NOT_PROCESSED."""
    silent_about_auth = Provider()
    with running(silent_about_auth, auth_exclude_mechanism=["LOGIN", "PLAIN"]) as port:
        exc = raised(send, port, login=True)
    assert isinstance(exc, smtplib.SMTPException)
    assert outcomes(exc) == (NOT_PROCESSED, NOT_PROCESSED)


def test_no_starttls(provider, port):
    """A server without STARTTLS gives NOT_PROCESSED."""
    exc = raised(send, port, starttls=ssl.create_default_context())
    assert isinstance(exc, smtplib.SMTPNotSupportedError)
    assert outcomes(exc) == (NOT_PROCESSED, NOT_PROCESSED)


def test_untrusted_certificate():
    """A certificate that the client does not trust gives NOT_PROCESSED."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    secure = Provider()
    with running(secure, tls_context=context) as port:
        exc = raised(send, port, starttls=ssl.create_default_context())
    assert isinstance(exc, ssl.SSLError)
    assert outcomes(exc) == (NOT_PROCESSED, NOT_PROCESSED)


def test_mass_mail(provider, port):
    """A call that sends several mails is in doubt if the server accepts one and refuses the next.

    Django's ``send_mass_mail`` makes such calls. A retry would send the first mail again.
    """
    project.set_up()
    from django.core.mail import EmailMessage
    from django.core.mail.backends.smtp import EmailBackend

    def send_mass_mail(*recipients):
        backend = EmailBackend(host="127.0.0.1", port=port, username="", password="")
        backend.send_messages([EmailMessage("s", "b", "a@x.example", [to]) for to in recipients])

    provider.replies = {"d@x.example": "451 later"}
    exc = raised(send_mass_mail, "c@x.example", "d@x.example")
    assert provider.delivered == 1
    assert outcomes(exc) == (UNKNOWN, REPEATED)
    assert outcomes(raised(send_mass_mail, "d@x.example")) == (RETRYABLE, RETRYABLE)


@pytest.mark.parametrize("silence", [HANG, HANG_UP])
@pytest.mark.parametrize("phase", ["EHLO", "MAIL", "RCPT"])
def test_silence_before_content(provider, port, phase, silence):
    """A server that goes silent before the mail's content gives RETRYABLE."""
    provider.replies = {phase: silence}
    exc = raised(send, port)
    assert isinstance(exc, smtplib.SMTPServerDisconnected)
    assert outcomes(exc) == (RETRYABLE, RETRYABLE)
    assert provider.delivered == 0


@pytest.mark.parametrize("silence", [HANG, HANG_UP])
def test_silence_after_content(provider, port, silence):
    """A mail is in doubt if the server goes silent after it has got the mail's content.

    It may deliver the mail.
    """
    provider.replies = {"DATA": silence}
    exc = raised(send, port)
    assert isinstance(exc, smtplib.SMTPServerDisconnected)
    assert provider.delivered == 1
    assert outcomes(exc) == (UNKNOWN, REPEATED)


def test_error_at_quit(provider, port):
    """A mail is in doubt after an error at QUIT.

    The server has accepted the mail before, so a retry because of the status 421 would send it
    again.
    """
    provider.replies = {"QUIT": "421 shutting down"}
    exc = raised(send, port)
    assert isinstance(exc, smtplib.SMTPResponseException)
    assert provider.delivered == 1
    assert outcomes(exc) == (UNKNOWN, REPEATED)


def test_error_without_traceback():
    """A mail is in doubt if the error has no traceback.

    The classifier finds in the traceback how far the call got. An unpickled error has none.
    """
    assert outcomes(smtplib.SMTPServerDisconnected("gone")) == (UNKNOWN, REPEATED)
