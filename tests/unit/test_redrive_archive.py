"""An archive of which a run was killed while it wrote, or which was something else before."""

import os
from functools import partial
from types import SimpleNamespace

import pytest

from celery_sqs_backoff.commands.show import closing
from celery_sqs_backoff.redrive import RedriveReport, archive
from celery_sqs_backoff.redrive.archive import Archive, ArchiveSource
from celery_sqs_backoff.redrive.errors import RedriveRefused
from celery_sqs_backoff.redrive.message import DeadLetter


def dump(messages, destinations, path):
    with Archive(path) as archive:
        archive.write(messages, destinations)


def letters(*ids):
    return [DeadLetter({"Body": "x" * 100_000, "MessageId": id_}) for id_ in ids]


def ids_in(path):
    return [letter.id for letter in ArchiveSource(path).receive(10, 30)]


def test_what_a_kill_has_cut_short_does_not_spoil_what_comes_after_it(tmp_path):
    """Its message was not deleted, and is archived again; the next one's line would be lost."""
    path = tmp_path / "a"
    dump(letters("a", "b"), [None, None], path)
    path.write_bytes(path.read_bytes()[:-3])
    dump(letters("c"), [None], path)
    assert ids_in(path) == ["a", "c"]


def test_a_load_says_what_is_cut_short(tmp_path):
    path = tmp_path / "a"
    dump(letters("a", "b"), [None, None], path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(RedriveRefused, match=r"Line 2 .* truncated"):
        ArchiveSource(path)


@pytest.mark.parametrize("text", ["dear diary", '{"name":"x"}', "\n"])
def test_a_file_that_is_no_archive_is_left_alone(tmp_path, text):
    path = tmp_path / "a"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(RedriveRefused, match="not a redrive archive"):
        Archive(path)
    assert path.read_text() == text


def test_two_runs_do_not_write_into_one_archive(tmp_path):
    with Archive(tmp_path / "a"), pytest.raises(RedriveRefused, match="in use"):
        Archive(tmp_path / "a")


def test_it_is_for_ourselves_alone(tmp_path):
    with Archive(tmp_path / "a"):
        assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


SOURCE = "arn:aws:sqs:eu-west-1:1:mail-dlq"


@pytest.mark.parametrize(
    ("lines", "word"),
    [
        ({"Destination": "http://sqs/1/gone"}, "names no destination"),
        ({"Source": SOURCE, "Destination": "arn:aws:sqs:eu-west-1:1:payments"}, "does not have"),
        ({"Source": "arn:aws:sqs:eu-west-1:1:gone", "Destination": SOURCE}, "does not have"),
        ({"Source": "nonsense", "Destination": SOURCE}, "does not have"),
    ],
)
def test_an_archive_cannot_send_where_sqs_would_not(lines, word):
    """Only to a queue that has the archive's source as its dead-letter queue, or to ``to``."""

    class Broker:
        def find(self, name):
            if name != SOURCE:
                raise RedriveRefused("There is no queue")
            mail = SimpleNamespace(arn="arn:aws:sqs:eu-west-1:1:mail")
            return SimpleNamespace(sources=lambda: [mail])

    route = archive.ArchiveRoute(Broker(), None)
    message = DeadLetter({"Body": "x", "MessageId": "a", **lines})
    assert word in route.destination(message)
    listed = {"Source": SOURCE, "Destination": "arn:aws:sqs:eu-west-1:1:mail"}
    found = route.destination(DeadLetter({"Body": "x", "MessageId": "a", **listed}))
    assert found.arn == listed["Destination"]


def test_a_message_that_stands_twice_in_an_archive_counts_once(tmp_path):
    dump(letters("a", "b", "a"), [None] * 3, tmp_path / "a")
    assert ArchiveSource(tmp_path / "a").depth().total == 2


@pytest.mark.parametrize("what", ["readable for others", "a link", "of another user", "a pipe"])
@pytest.mark.parametrize("open_it", [Archive, ArchiveSource], ids=["write", "read"])
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
    with pytest.raises(RedriveRefused, match=r"link|belongs to|open to other|not a file"):
        open_it(path)


def test_a_message_that_stands_twice_is_read_once(tmp_path):
    """Side by side in one receive, the second would be sent while the first is."""
    dump(letters("a", "a", "b"), [None] * 3, tmp_path / "a")
    assert ids_in(tmp_path / "a") == ["a", "b"]


def test_a_full_disk_does_not_keep_the_run_from_its_report(tmp_path):
    """Closing a file writes what it could not write before."""
    archive_ = Archive(tmp_path / "a")
    archive_._file.write(b'{"MessageId":')
    os.close(archive_._file.fileno())  # so that flushing fails
    with archive_:
        pass
    assert archive_._file.closed


def test_a_load_that_leaves_out_what_was_sent_before_says_how_to_send_it_again():
    """Its journal is kept by default: "0 of 3 sent" was all that was said."""
    report = RedriveReport(looked_at=3, skipped=3)
    shown = partial(closing, report, queue=None, options={"load": "old.jsonl"})
    assert any("--journal none" in sentence for sentence in shown(journal="j"))
    assert not any("--journal none" in sentence for sentence in shown(journal=None))


def test_a_fifo_archive_without_destinations_is_one(tmp_path):
    """Several threads would lose the order of its groups."""
    with Archive(tmp_path / "a", source=f"{SOURCE}.fifo") as archive:
        archive.write(letters("a"), [None])
    assert ArchiveSource(tmp_path / "a").is_fifo


@pytest.mark.parametrize(
    "system", [{"MessageGroupId": ["g"]}, {"MessageGroupId": 5}, {"AWSTraceHeader": 7}]
)
def test_a_line_that_was_edited_is_unreadable_and_ends_no_load(system):
    """boto3 refuses the whole batch with it, and the load ended."""
    message = DeadLetter({"Body": "x", "MessageId": "a", "Attributes": system})
    assert message.unreadable == "its attributes"
    assert message.group_id is None
    assert message.trace is None
