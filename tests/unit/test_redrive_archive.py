"""An archive of which a run was killed while it wrote, or which was something else before."""

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


def test_what_a_kill_has_cut_short_does_not_spoil_what_comes_after_it(tmp_path):
    """Its message was not deleted, and is archived again; the next one's line would be lost."""
    path = tmp_path / "a"
    dump(letters("a", "b"), [None, None], path)
    path.write_bytes(path.read_bytes()[:-3])
    dump(letters("c"), [None], path)
    assert ids_in(path) == ["a", "c"]


def test_a_reader_says_what_is_cut_short(tmp_path):
    path = tmp_path / "a"
    dump(letters("a", "b"), [None, None], path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(RedriveRefused, match=r"Line 2 .* truncated"):
        list(read_archive(path))


def test_it_is_for_ourselves_alone(tmp_path):
    with Archive(tmp_path / "a"):
        assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("what", ["readable for others", "a link", "of another user", "a pipe"])
@pytest.mark.parametrize(
    "open_it", [Archive, lambda path: list(read_archive(path))], ids=["write", "read"]
)
def test_a_file_that_is_not_ours_alone_is_refused(tmp_path, monkeypatch, what, open_it):
    """A planted archive or journal would steer the operator's rights."""
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
    with pytest.raises(RedriveRefused, match=r"a link|open to other|not a file of yours"):
        open_it(path)


def test_a_full_disk_does_not_keep_the_run_from_its_report(tmp_path):
    """Closing a file writes what it could not write before."""
    archive_ = Archive(tmp_path / "a")
    archive_._file.write(b'{"MessageId":')
    os.close(archive_._file.fileno())  # so that flushing fails
    with archive_:
        pass
    assert archive_._file.closed
