"""Classify the errors of smtplib, by the phase of SMTP in which the mail failed.

The client sends the content of a mail in the last phase, DATA. Before that phase, the server cannot
deliver the mail. Django's ``send_mail`` raises these errors unchanged.
https://docs.python.org/3/library/smtplib.html
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ..retry.outcomes import Classifier
from ..traces import certificate_rejected, had_sent_other_mails, list_functions
from .exchange import Diagnosis, ErrorRule, LibraryErrors, Meaning

# Functions of smtplib that run before the phase DATA. The function `data` runs this phase.
_BEFORE_DATA = {
    *("__init__", "connect", "_get_socket"),
    *("helo", "ehlo", "ehlo_or_helo_if_needed", "starttls", "login", "auth"),
    *("mail", "rcpt"),
}

_rule = partial(ErrorRule, "smtplib")
_os_error = partial(ErrorRule, "builtins", "OSError")  # the base class of SMTPException


def _before_data(exc: BaseException) -> bool:
    return bool(list_functions(exc, "smtplib") & _BEFORE_DATA)


def _in_smtplib(exc: BaseException) -> bool:
    return bool(list_functions(exc, "smtplib"))


def _meaning(code: object) -> Meaning | None:
    """Return the meaning of a reply code, or ``None`` for a code other than 4yz and 5yz.

    With a code 4yz the server refuses the mail for now, with 5yz for good (RFC 5321, 4.2.1).
    """
    if isinstance(code, int) and 400 <= code <= 499:
        return Meaning.REFUSED_FOR_NOW
    if isinstance(code, int) and 500 <= code <= 599:
        return Meaning.REFUSED
    return None


def _reply(exc: Any) -> Diagnosis:
    otherwise = Meaning.NOT_SENT if _before_data(exc) else Meaning.IN_DOUBT
    # smtplib uses this text for a reply that it has not read to the end. The code may be wrong.
    is_unread = exc.smtp_error == "Line too long."
    return Diagnosis((None if is_unread else _meaning(exc.smtp_code)) or otherwise)


def _read_refused_recipients(exc: Any) -> Diagnosis:
    """Return the diagnosis for refused recipients. Retry if some may be accepted later."""
    refused: Mapping[str, tuple[int, bytes]] = exc.recipients
    for_good = all(_meaning(code) is Meaning.REFUSED for code, _ in refused.values())
    return Diagnosis(Meaning.REFUSED if for_good else Meaning.REFUSED_FOR_NOW)


RULES: tuple[ErrorRule, ...] = (
    _os_error(
        Meaning.IN_DOUBT,
        "`send_mass_mail`: earlier mails of the same call were accepted",
        had_sent_other_mails,
    ),
    _os_error(
        Meaning.REFUSED,
        "raised in smtplib: an untrusted certificate",
        lambda exc: _in_smtplib(exc) and certificate_rejected(exc),
    ),
    _os_error(
        Meaning.IN_DOUBT,
        "raised in smtplib at QUIT: the server had already accepted the mail",
        lambda exc: bool(list_functions(exc, "smtplib") & {"quit", "__exit__"}),
    ),
    _rule(
        "SMTPRecipientsRefused",
        _read_refused_recipients,
        "RCPT, all recipients: refused if all replies are 5yz, otherwise refused for now",
    ),
    _rule(
        "SMTPConnectError SMTPHeloError SMTPAuthenticationError SMTPSenderRefused SMTPDataError"
        " SMTPResponseException",
        _reply,
        "greeting, HELO, AUTH, MAIL, DATA: 4yz is refused for now, 5yz refused",
    ),
    _rule("SMTPNotSupportedError", Meaning.REFUSED, "smtplib refuses to send the mail"),
    _rule(
        "SMTPException",
        Meaning.REFUSED,
        "AUTH: client and server have no method in common",
        lambda exc: (
            type(exc).__name__ == "SMTPException" and "login" in list_functions(exc, "smtplib")
        ),
    ),
    _rule("SMTPServerDisconnected", Meaning.NOT_SENT, "before DATA", _before_data),
    _rule("SMTPServerDisconnected", Meaning.IN_DOUBT, "in DATA, or at an unknown moment"),
    _rule("SMTPException", None, "any other"),
    _os_error(
        Meaning.NOT_SENT,
        "raised in smtplib before DATA: DNS, a refused connection, a timeout, the TLS handshake",
        _before_data,
    ),
    _os_error(Meaning.IN_DOUBT, "raised in smtplib: a reset or a timeout in DATA", _in_smtplib),
)


def smtplib_errors(*, idempotent: bool = False) -> Classifier:
    """Return a classifier for the errors of smtplib.

    smtplib raises no error if the server accepted at least one recipient. Instead, ``sendmail``
    returns the refused recipients.

    Args:
        idempotent: ``True`` = the mail may be sent twice without harm, so a failure in DATA is
            retried, and ``on_not_processed`` is not called. Default ``False``.

    Raises:
        TypeError: ``idempotent`` is not a bool.
    """
    return LibraryErrors("smtplib", RULES, idempotent)
