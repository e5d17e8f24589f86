"""The journal of a redrive tells the next run what a killed run has sent and deleted.

A message is in doubt if it may or may not have been sent.
"""

import errno
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_sqs_backoff.redrive.errors import RedriveRefused
from celery_sqs_backoff.redrive.files import Journal

URL = "http://sqs/1/dlq"


def open_journal(path, source=URL):
    return Journal(path, source=source)


def test_resume_after_kill(tmp_path):
    """After a kill, sends without an answer are in doubt. Confirmed sends only need a delete."""
    with open_journal(tmp_path / "j") as journal:
        journal.write("sending", ["a", "b", "c", "d"], 7.0)
        journal.write("sent", ["a", "b"])
        journal.write("unsent", ["c"])
        journal.write("deleted", ["a"])
    with open_journal(tmp_path / "j") as journal:
        assert journal.past == {"d": 7.0, "b": None}
        assert journal.is_resumed


def test_new_run_after_end(tmp_path):
    """If the last run was not killed, the next is a new run. It still knows what is in doubt."""
    with open_journal(tmp_path / "j") as journal:
        journal.write("sending", ["a"], 7.0)
        journal.write("ended", [])
    with open_journal(tmp_path / "j") as journal:
        assert not journal.is_resumed
        assert journal.past == {"a": 7.0}


def test_lines_are_synced(tmp_path, monkeypatch):
    """A line about sends is on the disk when ``write`` returns."""
    synced = []
    with open_journal(tmp_path / "j") as journal:
        monkeypatch.setattr(
            "os.fsync", lambda fd: synced.append((tmp_path / "j").read_bytes().count(b"\n"))
        )
        journal.write("sending", ["a"], 7.0)
        journal.write("sent", ["a"])
    assert synced == [2, 3]


@given(cut=st.integers(0, 400))
def test_truncated_journal(tmp_path_factory, cut):
    """If a journal was cut at any byte, its whole lines count, and the next run appends to it."""
    path = tmp_path_factory.mktemp("journal") / "j"
    with open_journal(path) as journal:
        for n in range(5):
            journal.write("sending", [f"m{n}"], float(n))
            journal.write("sent", [f"m{n}"])
    whole = path.read_bytes()[:cut]
    path.write_bytes(whole)
    lines = whole.decode().split("\n")[:-1]
    with open_journal(path) as journal:

        def whose(kind):
            return {
                f"m{n}" for n in range(5) if any(f'"{kind}","ids":["m{n}"]' in x for x in lines)
            }

        sent, begun = whose("sent"), whose("sending")
        assert {id_ for id_, at in journal.past.items() if at is None} == sent
        assert set(journal.past) == begun
        journal.write("sending", ["new"], 1.0)
    with open_journal(path) as journal:
        assert "new" in journal.past


def test_journal_of_other_queue(tmp_path):
    """A redrive refuses the journal of another queue."""
    with open_journal(tmp_path / "j"):
        pass
    with pytest.raises(RedriveRefused, match=r"belongs to http://sqs/1/dlq, not to http://other"):
        open_journal(tmp_path / "j", source="http://other")


def test_journal_in_use(tmp_path):
    """A redrive refuses a journal that another run uses."""
    with open_journal(tmp_path / "j"), pytest.raises(RedriveRefused, match="in use"):
        open_journal(tmp_path / "j")


def test_no_locks(tmp_path, monkeypatch):
    """If the file system has no locks, the error says so, and not that the journal is in use."""

    def flock(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(RedriveRefused, match=r"Cannot lock journal .*: No locks available"):
        open_journal(tmp_path / "j")


@pytest.mark.parametrize(
    "text", ["dear diary\n", "dear diary", '{"name":"one line, no line end"}', "\n", "{}\n"]
)
def test_not_a_journal(tmp_path, text):
    """A redrive refuses a file that is not a journal, and does not change it."""
    (tmp_path / "j").write_text(text)
    (tmp_path / "j").chmod(0o600)
    with pytest.raises(RedriveRefused, match="not a redrive journal"):
        open_journal(tmp_path / "j")
    assert (tmp_path / "j").read_text() == text


@pytest.mark.parametrize(
    "line",
    [
        "}",
        "[]",
        "7",
        '{"is":"sent","ids":5}',
        '{"is":"sent","ids":[5]}',
        '{"is":"sending","ids":["a"]}',
        '{"is":"eaten","ids":["a"]}',
        '{"ids":["a"]}',
        "\0" * 20,
    ],
)
def test_damaged_line(tmp_path, line):
    """If a line of the journal is damaged, the error names the line."""
    with open_journal(tmp_path / "j"):
        pass
    with (tmp_path / "j").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(RedriveRefused, match=r"Line 2 of journal .* is damaged"):
        open_journal(tmp_path / "j")


def test_unwritable_journal(tmp_path):
    """A redrive refuses a journal that it cannot write."""
    with pytest.raises(RedriveRefused, match=r"Cannot open journal .*: No such file or directory"):
        open_journal(tmp_path / "no-such-directory" / "j")


def test_full_disk(tmp_path, monkeypatch):
    """On a full disk, a redrive refuses to start and names the file."""

    def fsync(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fsync)
        with pytest.raises(RedriveRefused, match=r"Cannot write journal .*/j: No space left"):
            open_journal(tmp_path / "j")
    with open_journal(tmp_path / "j") as journal:
        assert not journal.past
