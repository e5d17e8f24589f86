"""The archive of a redrive is a file of dead letters, one per line.

With ``delete``, a redrive writes a message there before it deletes it from the queue.
"""

import os

import pytest

from celery_sqs_backoff.redrive.errors import RedriveRefused
from celery_sqs_backoff.redrive.files import Archive, read_archive
from celery_sqs_backoff.redrive.message import DlqMessage


def dump(messages, destinations, path):
    with Archive(path) as archive:
        archive.write(messages, destinations)


def letters(*ids):
    return [DlqMessage({"Body": "x" * 100_000, "MessageId": id_}) for id_ in ids]


def ids_in(path):
    return [letter.id for letter in read_archive(path)]


def test_truncated_line(tmp_path):
    """If a kill has cut the last line short, the next redrive removes it before it writes.

    Otherwise the next message would be written on the same line and lost. The message of the
    removed line is still on the queue.
    """
    path = tmp_path / "a"
    dump(letters("a", "b"), [None, None], path)
    path.write_bytes(path.read_bytes()[:-3])
    dump(letters("c"), [None], path)
    assert ids_in(path) == ["a", "c"]


def test_reader_of_truncated_line(tmp_path):
    """If a line is cut short, the reader raises an error that names the line and both causes.

    After a kill, the message is still on the queue. In a damaged copy, it is missing.
    """
    path = tmp_path / "a"
    dump(letters("a", "b"), [None, None], path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(RedriveRefused, match=r"Line 2 .* truncated.* kill .* damaged copy"):
        list(read_archive(path))


def test_private_file(tmp_path):
    """Only the user who writes an archive can read it."""
    with Archive(tmp_path / "a"):
        assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("what", ["readable for others", "a link", "of another user", "a pipe"])
@pytest.mark.parametrize(
    "open_it", [Archive, lambda path: list(read_archive(path))], ids=["write", "read"]
)
def test_unsafe_file(tmp_path, monkeypatch, what, open_it):
    """A redrive refuses an archive that other users can read or could have written.

    Another user could write an archive whose messages the operator would then send.
    """
    path = tmp_path / "a"
    dump(letters("a"), [None], path)
    if what == "readable for others":
        path.chmod(0o640)
    elif what == "a link":
        path.rename(tmp_path / "b")
        path.symlink_to(tmp_path / "b")
    elif what == "of another user":
        monkeypatch.setattr("os.geteuid", lambda: 12345)
    else:
        path.unlink()
        os.mkfifo(path, 0o600)
    with pytest.raises(RedriveRefused, match=r"a link|open to other|not a regular file"):
        open_it(path)


def test_full_disk(tmp_path):
    """If the disk is full when an archive is closed, no error hides the report of the redrive.

    Closing a file may write, because it writes the rest of its buffer.
    """
    archive_ = Archive(tmp_path / "a")
    archive_._file.write(b'{"MessageId":')
    os.close(archive_._file.fileno())  # so that flushing fails
    with archive_:
        pass
    assert archive_._file.closed
