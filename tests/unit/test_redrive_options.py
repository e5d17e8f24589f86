"""Options of ``celery sqs-redrive`` and ``celery sqs-peek`` that select messages."""

import json

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner

from celery_sqs_backoff.commands.exit_codes import USAGE
from celery_sqs_backoff.commands.options import ids_of
from celery_sqs_backoff.commands.peek import sqs_peek
from celery_sqs_backoff.commands.redrive import sqs_redrive


@pytest.mark.parametrize("command", [sqs_redrive, sqs_peek], ids=lambda command: command.name)
def test_ids_not_text(command, tmp_path):
    """The commands refuse a file of IDs that is not text. With ``--json`` they print why."""
    file = tmp_path / "ids"
    file.write_bytes(b"\xff\xfe\x00a\n")
    celery = CLIContext(app=Celery(), no_color=True, workdir=None, quiet=False)
    found = CliRunner().invoke(command, ["q", "--ids", str(file), "--json"], obj=celery)
    assert found.exit_code == USAGE
    assert json.loads(found.output.splitlines()[0])["ended"] == "refused"


def test_byte_order_mark(tmp_path):
    """A byte order mark at the beginning of a file is not part of the first ID."""
    (tmp_path / "ids").write_bytes(b"\xef\xbb\xbfa\nb\n")
    assert ids_of(["c"], tmp_path / "ids") == ["c", "a", "b"]


@pytest.mark.parametrize("option", ["--task", "--reason", "--error", "--from"])
@pytest.mark.parametrize("command", [sqs_redrive, sqs_peek], ids=lambda command: command.name)
def test_empty_selection(command, option):
    """The commands refuse an empty text for an option.

    If a script says ``--task "$TASK"`` and ``TASK`` is not set, no message would match.
    """
    celery = CLIContext(app=Celery(), no_color=True, workdir=None, quiet=False)
    found = CliRunner().invoke(command, ["q", option, ""], obj=celery)
    assert (found.exit_code, "omit it" in found.output) == (USAGE, True)
