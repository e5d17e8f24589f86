"""Credentials in the texts of errors are masked, and masking takes little time."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_sqs_backoff.sqs.redact import (
    MAX_MESSAGE_CHARACTERS,
    MAX_TRACEBACK_CHARACTERS,
    ErrorText,
    mask,
    redact_text,
)

SECRETS = ("hunter2", "wJalr", "K7MDENG", "dXNlcjpwdw", "abcdef0123", "MIIEvQ", "battery", "pa/ss")

#: Texts with a credential, each in another form in which libraries or people write it.
FORMS = {
    "password": "password=hunter2 is wrong",
    "password of a database": "db_password=hunter2",
    "environment": "PGPASSWORD=hunter2",
    "ODBC": "Server=db;Uid=sa;Pwd=hunter2;",
    "with spaces in quotes": "password='correct horse battery'",
    "with a comma in quotes": 'password="ab,hunter2"',
    "with an escaped quote": r"password='it\'s hunter2'",
    "with a comma": "password=ab,hunter2 was refused",
    "unclosed quote": "password='correct hunter2",
    "JSON": '{"api_key": "hunter2"}',
    "JSON in JSON": r'body was "{\"password\": \"cor hunter2\"}"',
    "JSON in JSON, escaped twice": r'"{\\\"password\\\": \\\"hunter2\\\"}"',
    "repr of a dict": "{'refresh_token': 'hunter2', 'n': 1}",
    "repr of bytes": "{b'password': b'hunter2'}",
    "repr of pairs": "[('Authorization', 'Token hunter2')]",
    "repr of lists": "{'X-Api-Key': ['hunter2']}",
    "Ruby": ":secret => 'hunter2'",
    "XML": "<password>hunter2</password>",
    "form": "grant_type=x&client_secret=hunter2&scope=y",
    "query": "GET https://api.example/x?access_token=hunter2 -> 500",
    "key in a query": "https://maps.example/x?key=hunter2",
    "signature in a query": "https://x.example/c?sv=1&sig=hunter2",
    "AWS signature": "?X-Amz-Signature=hunter2&x=1",
    "AWS session token": "X-Amz-Security-Token: hunter2",
    "AWS secret": "aws_secret_access_key='wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY'",
    "AWS secret in the environment": "AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG",
    "Django": "SECRET_KEY = 'django-hunter2'",
    "private key by name": "private_key=hunter2",
    "private key": "-----BEGIN PRIVATE KEY-----\nMIIEvQ\nx==\n-----END PRIVATE KEY-----",
    "private key, cut": "-----BEGIN RSA PRIVATE KEY-----\nMIIEvQ",
    "private key, its end": "MIIEvQ\n-----END EC PRIVATE KEY-----",
    "private key in a repr": r"'-----BEGIN OPENSSH PRIVATE KEY-----\nMIIEvQ\n'",
    "Bearer": "Authorization: Bearer hunter2",
    "Basic": "authorization='Basic hunter2'",
    "Basic, other separator": "Authorization=Basic dXNlcjpwdw==",
    "Token": "Authorization: Token abcdef0123",
    "Digest": "Authorization: Digest username=x, response=hunter2",
    "AWS4": "Authorization: AWS4-HMAC-SHA256 Credential=x, Signature=hunter2",
    "unknown scheme in quotes": "'Authorization': 'Custom one hunter2'",
    "Bearer without a header": "sent Bearer hunter2hunter2",
    "cookie": "Cookie: sessionid=hunter2",
    "URL": "GET https://bob:hunter2@mail.example/send",
    "URL, slash": "redis://:pa/ss-hunter2@host:6379/0",
    "URL, at": "amqp://user:p@hunter2@host/",
    "URL, question mark": "postgres://u:p?hunter2@h/db",
    "URL, user only": "https://hunter2@api.example/",
    "URL of SQS": "sqs://AKIAIOSFODNN7EXAMPLE:wJalr/K7MDENG/bPx@",
    "two URLs": "redis://:a@h,redis://:hunter2@h",
    "AWS key id": "hunter2".replace("hunter2", "AKIAIOSFODNN7EXAMPLE"),
    "JWT": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcdef0123",
    "Stripe": "No such key sk_live_abcdef0123",
    "GitHub": "ghp_abcdef0123abcdef0123",
    "Slack": "xoxb-1234-abcdef0123",
    "Google": "AIzaSyA-abcdef0123abcdef0123abcdef0123",
}


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS.keys())
def test_credential(text):
    """A credential is masked in the message and in the traceback."""
    found = ErrorText.of(ValueError(f"before {text}"), traceback=f"Traceback\nValueError: {text}")
    for shown in (found.exception_message, found.traceback):
        assert "***" in shown
        assert not [s for s in (*SECRETS, "AKIAIO", "eyJhb") if s in shown]


#: If the beginning of a private key is cut off, all text before its end may belong to the key.
KEEPING = {name: text for name, text in FORMS.items() if name != "private key, its end"}


@pytest.mark.parametrize("text", KEEPING.values(), ids=KEEPING.keys())
def test_text_before_credential(text):
    """Masking keeps the text before a credential."""
    assert mask(f"mail 7 to provider: {text}").startswith("mail 7 to provider: ")


@pytest.mark.parametrize(
    "text",
    [
        "POST https://mail.example/v1/send?page=2 answered 503: try later",
        "https://mail.example:8080/users/@bob",
        "Invalid email address jane@mail.example",
        "the secretary: Bob",
        "compass: north, bypass=1",
        "Basic authentication is required",
        "KeyError: 'customer'",
        'File "/srv/shop/tokens.py", line 3, in passwords',
        "-----BEGIN CERTIFICATE-----",
    ],
)
def test_ordinary_text(text):
    """A text without a credential is not changed."""
    assert mask(text) == text


def test_credential_across_cut():
    """A credential is masked even if a long text is cut in the middle of it.

    A credential is recognised by its name, so the cut must not separate the two.
    """
    for room in range(60):
        message = redact_text(
            "x" * (MAX_MESSAGE_CHARACTERS - room) + " password='a b hunter2'" + "y" * 9_000,
            MAX_MESSAGE_CHARACTERS,
        )
        assert "hunter" not in message
        traceback = redact_text(
            "x" * 9_000
            + "\n{'password': 'hunter2 hunter2 hunter2'}\n"
            + "y" * (MAX_TRACEBACK_CHARACTERS - room),
            MAX_TRACEBACK_CHARACTERS,
            keep_end=True,
        )
        assert "hunter" not in traceback


def test_long_texts():
    """A long message keeps its beginning, and a long traceback keeps its end."""
    message = redact_text("first " + "x " * 90_000, MAX_MESSAGE_CHARACTERS)
    assert message.startswith("first ")
    assert len(message) <= MAX_MESSAGE_CHARACTERS + 4
    traceback = redact_text(
        "frame\n" * 50_000 + "ValueError: boom", MAX_TRACEBACK_CHARACTERS, keep_end=True
    )
    assert traceback.endswith("ValueError: boom")
    assert len(traceback) <= MAX_TRACEBACK_CHARACTERS + 4


# Time

#: Pieces of credentials. In texts that are made of them, a search is most likely slow.
PIECES = (
    *("a-", "a.", "x-amz-", "token", "token_", "secret-", "password", "authorization", "://", "a:"),
    *("@", "eyJ", "sk-", "SG.", "AKIA", "-----BEGIN ", "PRIVATE KEY", "-----", "-----END ", "\\"),
    *('"', "'", "=", ": ", " ", "\n", "Bearer ", "xoxb-", "ghp_", "[", "b'", "pass", "_", "key"),
)


def seconds(text):
    """Return the CPU time of masking a text: the least of three, because other work disturbs it."""
    times = []
    for _ in range(3):
        start = time.thread_time()
        mask(text)
        times.append(time.thread_time() - start)
    return min(times)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join))
def test_linear_time(unit):
    """The time to mask a text grows in proportion to its length.

    A text 31 times as long may take up to 64 times as long. A quadratic search would take 961
    times as long.
    """
    few, many = 1_000 // len(unit) + 1, 31_000 // len(unit) + 1
    assert seconds(unit * many) <= 64 * seconds(unit * few) + 0.01


def test_time_of_large_error():
    """Masking a text of 10 MB takes less than half a second, because most is cut off before."""
    poison = "a-" * 5_000_000
    start = time.thread_time()
    redact_text(poison, MAX_MESSAGE_CHARACTERS)
    redact_text(poison, MAX_TRACEBACK_CHARACTERS, keep_end=True)
    assert time.thread_time() - start < 0.5


# The task's options


def test_custom_redact():
    """The user's ``redact`` function gets texts that are masked already."""
    seen = []

    def redact(text):
        seen.append(text)
        return text.replace("4111", "####")

    found = ErrorText.of(
        ValueError("card 4111, password=hunter2"), traceback="ValueError: 4111", redact=redact
    )
    assert found.exception_message == "card ####, password=***"
    assert found.traceback == "ValueError: ####"
    assert seen == ["card 4111, password=***", "ValueError: 4111"]
    longer = ErrorText.of(ValueError("x"), traceback="y", redact=lambda text: text * 100_000)
    assert len(longer.exception_message) == MAX_MESSAGE_CHARACTERS
    assert len(longer.traceback) == MAX_TRACEBACK_CHARACTERS


@pytest.mark.parametrize("redact", [lambda text: 1 / 0, lambda text: None, lambda text: b"x"])
def test_redact_fails(redact):
    """If the user's ``redact`` function fails on a text, the text is left out."""
    found = ErrorText.of(ValueError("card 4111"), traceback="ValueError: card 4111", redact=redact)
    assert found == ErrorText(exception_type="builtins.ValueError")


def test_type_only():
    """With ``type_only``, only the type of an error is kept."""
    found = ErrorText.of(ValueError("card 4111"), traceback="ValueError: card 4111", type_only=True)
    assert found == ErrorText(exception_type="builtins.ValueError")


def test_unprintable_exception():
    """An exception whose ``str()`` raises is described by the type of the error raised."""

    class Unprintable(Exception):
        def __str__(self):
            raise RuntimeError("hunter2")

    assert ErrorText.of(Unprintable()).exception_message == "<unprintable: RuntimeError>"


def test_traceback_of_exception():
    """If no traceback is given, it is formatted from the exception."""
    try:
        raise ValueError("password=hunter2")
    except ValueError as exc:
        found = ErrorText.of(exc)
    assert found.traceback.startswith("Traceback (most recent call last)")
    assert found.traceback.endswith("ValueError: password=***\n")


def test_deep_traceback():
    """A deep traceback keeps its innermost frames."""

    def fall(depth):
        if depth:
            fall(depth - 1)
        raise ValueError("landed")

    try:
        fall(900)
    except ValueError as exc:
        found = ErrorText.of(exc)
    assert found.traceback.endswith("ValueError: landed\n")
