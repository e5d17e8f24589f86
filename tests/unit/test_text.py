"""How our log lines and commands print text that other people may have written."""

import pytest

from celery_sqs_backoff.text import error_site, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("shop.send_email", "shop.send_email"),
        ("Größe 質量", "Größe 質量"),
        ("", ""),
        ("a\nERROR forged line", r"a\nERROR forged line"),
        ("\x1b[31mred\x9b", r"\x1b[31mred\x9b"),
        ("pay\u202egnp.exe", r"pay\u202egnp.exe"),
        ("\u2066a\u2069\u200b\ufeff", r"\u2066a\u2069\u200b\ufeff"),
        ("line\u2028paragraph\u2029", r"line\u2028paragraph\u2029"),
        ("\ud800", r"\ud800"),
    ],
)
def test_printable(text, shown):
    """Control characters are escaped, so that a text stays on one line, in its written order."""
    assert printable(text) == shown


def test_long_text():
    """A text that is longer than the limit is cut."""
    assert printable("x" * 200) == "x" * 200
    assert printable("x" * 200_000) == "x" * 200 + "..."
    assert printable("x" * 11, limit=10) == "x" * 10 + "..."


def test_limit_with_escapes():
    """The limit holds for the text with its escapes, and an escape is not cut in half."""
    assert printable("\U000e0001" * 500, limit=20) == r"\U000e0001\U000e0001" + "..."


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "None"),
        (True, "True"),
        (-5, "-5"),
        (1.5, "1.5"),
        (10**9_000, "<int>"),
        ([[[1]]], "<list>"),
        ({"password": "hunter2"}, "<dict>"),
        (b"hunter2", "<bytes>"),
    ],
    ids=type,
)
def test_not_text(value, shown):
    """A value that is no text is printed as its type, except None, a bool or a short number."""
    assert printable(value) == shown


def test_error_site():
    """``error_site`` names the type and place of an error, and nothing of its text."""

    def undo():
        try:
            raise ValueError("card 4111")
        except ValueError:
            raise OSError("password=hunter2")  # noqa: B904

    try:
        undo()
    except OSError as exc:
        site = error_site(exc)
    assert site.startswith("builtins.OSError at ")
    assert f"{__file__}:" in site
    assert site.endswith(" in undo")
    assert "hunter2" not in site
    assert "4111" not in site
    assert error_site(pytest.UsageError("never raised")) == "pytest.UsageError"
