"""Finds credentials in the texts of errors by their usual forms, and masks them.

An error's text can quote data of a sender, who may want to slow the search down. So a text is cut
before it is searched, and each pattern takes linear time. To keep a pattern linear, no unbounded
quantifier contains another, and a quantifier is bounded if the pattern can still fail after it. The
search cannot find every credential, because a password in a sentence has no form of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from traceback import format_exception

from ..text import type_name

MAX_MESSAGE_CHARACTERS = 1_000
MAX_TRACEBACK_CHARACTERS = 6_000

MASK = "***"

#: The search includes this many characters beyond the cut, to find a credential that the cut
#: divides.
_MARGIN = 2_000

#: A traceback is formatted with at most this many frames of each exception in a chain. A record may
#: have fewer, because its text is cut.
_MAX_FRAMES = 60

_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----")
_END_OF_KEY = re.compile(r"-----END [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----")

#: Characters that can stand between ``://`` and the end of a URL in a text.
_URL = re.compile(r"[^\s\"'<>`]{0,2000}")

_KEYWORD = r"""
    (?: pass(?:w(?:or)?d|phrase|code)s? | (?<![a-z])pass | (?<![a-z])pwd | secrets? | token
      | api[_-]?key | access[_-]?key | account[_-]?key | private[_-]?key | signing[_-]?key
      | encryption[_-]?key | shared[_-]?key | (?<=[?&])key | credentials? | cookie | signature
      | (?<![a-z])sig | session[_-]?id | (?<![a-z])sid
      | x-amz-(?:credential|signature|security-token|server-side-encryption-customer-key) )
    (?:[_-][\w-]{0,40})?
"""

#: Text between a name and its value: ``=``, ``: ``, ``": "``, ``\": \"``, ``', '`` (a pair),
#: ``=>``, ``>`` (XML).
_SEPARATOR = r"""
    (?: \\{0,3}["'] \s{0,3} , \s{0,3} (?=[bru]{0,2}\\{0,3}["'])
      | \\{0,3}["']? \]? \s{0,3} (?: => | [=:>] ) \s{0,3} )
    [\[({]{0,2}
"""

#: A quoted value, which may hold anything up to the same quote. If the text was cut, the closing
#: quote may be missing.
_QUOTED = r"""
      [bru]{0,2} (?P<quote>["']) (?: [^"'\\\n] | \\. | (?!(?P=quote))["'] )* (?P=quote)?
    | [bru]{0,2} (?P<escaped>\\{1,3}["']) (?: (?!(?P=escaped)) [^\n] )* (?P=escaped)?
"""

_NAMED = re.compile(
    rf"""(?ix)
    (?P<name> (?: (?P<header> (?:proxy-)?authorization ) | {_KEYWORD} ) {_SEPARATOR} )
    (?: {_QUOTED}
      | (?(header)
            (?: (?:basic|bearer|token|bot|key|api-?key|negotiate) \s{{1,3}} [^\s"'&<]* | [^\n"<]* )
          | (?:(?:basic|bearer|token) \s{{1,3}})? [^\s"'&<]+ )
    )
    """
)

#: Credentials with a form of their own.
_BARE = re.compile(
    r"""(?x)
    (?<![A-Za-z0-9])
    (?: (?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])                       # AWS access key ids
      | eyJ[\w.+/=-]{10,}                                              # JWT, or JSON in base64
      | (?:[sr]k_(?:live|test)|whsec)_\w{8,}                           # Stripe
      | gh[pousr]_\w{16,} | github_pat_\w{16,} | glpat-[\w-]{16,}      # GitHub, GitLab
      | xox[a-z]-[\w-]{8,} | xapp-[\w-]{8,}                            # Slack
      | AIza[\w-]{30,}                                                 # Google
      | sk-[\w-]{16,}                                                  # providers of AI models
      | SG\.[\w-]{16,64}\.[\w-]{16,}                                   # SendGrid
      | key-[0-9a-f]{32}                                               # Mailgun
    )
    """
)
#: ``Bearer ...`` or ``Basic ...`` without the name of a header. The value must have a digit or
#: ``=``, unlike a word in a sentence.
_SCHEME = re.compile(r"(?i)\b(bearer|basic)(\s{1,3})(?=[^\s\"']{0,200}[0-9=])[^\s\"',;]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorText:
    """The texts of an error for a dead-letter record, short and with credentials masked.

    An instance without values means no error. It holds plain strings, because the task's process
    sends it to the main process.
    """

    exception_type: str | None = None
    exception_message: str | None = None
    traceback: str | None = None
    #: The run's span, as a W3C ``traceparent``.
    trace: str | None = None

    @classmethod
    def of(
        cls,
        exc: BaseException,
        *,
        traceback: str | None = None,
        type_only: bool = False,
        redact: Callable[[str], str] | None = None,
    ) -> ErrorText:
        """Describe an error. Call it in the process that ran the task. Never raises.

        Args:
            exc: the exception. Its ``__str__`` is the user's code and may raise.
            traceback: the formatted text. ``None``: the traceback of ``exc``, if it has one.
            type_only: keep only the name of the class.
            redact: the user's own masking. It gets each text that this method has cut and masked.
                If it raises, or returns anything but a string, that text is left out.
        """
        if type_only:
            return cls(exception_type=type_name(exc))
        message = redact_text(_text(exc), MAX_MESSAGE_CHARACTERS)
        frames = redact_text(traceback or _format(exc), MAX_TRACEBACK_CHARACTERS, keep_end=True)
        return cls(
            exception_type=type_name(exc),
            exception_message=_by_user(redact, message, MAX_MESSAGE_CHARACTERS),
            traceback=_by_user(redact, frames, MAX_TRACEBACK_CHARACTERS),
        )


def redact_text(text: str | None, limit: int, *, keep_end: bool = False) -> str | None:
    """Return a text with credentials masked, cut to about ``limit`` characters.

    First cut the text to ``limit`` and a margin, so that the time does not grow with the text.

    Args:
        text: ``None`` stays ``None``.
        limit: number of characters to keep, without the dots that mark a cut.
        keep_end: keep the end instead of the beginning. A traceback has its error at the end.
    """
    if text is None:
        return None
    window = limit + _MARGIN
    is_cut = len(text) > window
    if is_cut:
        text = _from_a_boundary(text[-window:]) if keep_end else text[:window]
    masked = mask(text)
    if not is_cut and len(masked) <= limit:
        return masked
    return f"... {masked[-limit:]}" if keep_end else f"{masked[:limit]} ..."


def mask(text: str) -> str:
    """Replace text in the form of a credential by ``***``, in time linear in the text's length."""
    text = _without_private_keys(text)
    text = _without_userinfo(text)
    text = _NAMED.sub(rf"\g<name>{MASK}", text)
    text = _BARE.sub(MASK, text)
    return _SCHEME.sub(rf"\1\2{MASK}", text)


def _from_a_boundary(text: str) -> str:
    """Drop the first line, which was cut. If it is long, drop only its first word.

    If this word is long, too, drop 2,000 characters.
    """
    for end in ("\n", " "):
        position = text.find(end, 0, _MARGIN)
        if position != -1:
            return text[position:]
    return text[_MARGIN:]


def _without_private_keys(text: str) -> str:
    """Mask each key from its first line to its last. In a cut text, either line may be missing."""
    if "PRIVATE KEY" not in text:
        return text
    kept, position = [], 0
    first_end, first_begin = _END_OF_KEY.search(text), _PRIVATE_KEY.search(text)
    if first_end and not (first_begin and first_begin.start() < first_end.start()):
        kept, position = [MASK], first_end.end()
    while begin := _PRIVATE_KEY.search(text, position):
        kept += [text[position : begin.start()], MASK]
        end = _END_OF_KEY.search(text, begin.end())
        position = end.end() if end else len(text)
    return "".join([*kept, text[position:]])


def _without_userinfo(text: str) -> str:
    """Mask the user and the password of URLs."""
    first, *rest = text.split("://")
    return "://".join([first, *map(_without_userinfo_at_the_start, rest)])


def _without_userinfo_at_the_start(text: str) -> str:
    """Mask ``user:password`` before ``@``. A password may hold ``/``, ``?`` and ``@``."""
    url = _URL.match(text)
    assert url is not None  # the pattern matches even the empty text
    authority = re.split(r"[/?#]", url[0], maxsplit=1)[0]
    if "@" in authority:
        return f"{MASK}{text[authority.rindex('@') :]}"
    _, colon, port = authority.partition(":")
    if colon and not port.isdigit() and "@" in url[0]:
        return f"{MASK}{text[url[0].rindex('@') :]}"
    return text


def _text(exc: BaseException) -> str:
    try:
        return str(exc)
    except Exception as broken:  # noqa: BLE001
        # The user's __str__ must not keep the message from its dead-letter queue.
        return f"<unprintable: {type(broken).__name__}>"


def _format(exc: BaseException) -> str | None:
    """Return the traceback as Python prints it, of the innermost frames only."""
    if exc.__traceback__ is None:
        return None
    try:
        return "".join(format_exception(type(exc), exc, exc.__traceback__, limit=-_MAX_FRAMES))
    except Exception:  # noqa: BLE001
        # The exception's class is the user's code, and its attributes may raise.
        return None


def _by_user(redact: Callable[[str], str] | None, text: str | None, limit: int) -> str | None:
    if text is None or redact is None:
        return text
    try:
        found = redact(text)
    except Exception:  # noqa: BLE001
        # The user's code may raise. A text that it could not mask is not kept.
        return None
    return found[:limit] if isinstance(found, str) else None
