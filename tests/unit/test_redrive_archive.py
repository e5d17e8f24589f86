"""An archive of which a run was killed while it wrote, or which was something else before."""

import pytest

from celery_sqs_backoff.redrive import archive
from celery_sqs_backoff.redrive.archive import Archive, ArchiveSource, dump
from celery_sqs_backoff.redrive.errors import RedriveRefused
from celery_sqs_backoff.redrive.letter import Letter


def letters(*ids):
    return [Letter({"Body": "x" * 100_000, "MessageId": id_}) for id_ in ids]


def ids_in(path):
    return [letter.id for letter in ArchiveSource(path).receive(10)]


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
    with pytest.raises(RedriveRefused, match=r"Line 2 .* cut short"):
        ArchiveSource(path)


@pytest.mark.parametrize("text", ["dear diary", '{"name":"x"}', "\n"])
def test_a_file_that_is_no_archive_is_left_alone(tmp_path, text):
    path = tmp_path / "a"
    path.write_text(text)
    with pytest.raises(RedriveRefused, match="no archive"):
        Archive(path)
    assert path.read_text() == text


def test_two_runs_do_not_write_into_one_archive(tmp_path):
    with Archive(tmp_path / "a"), pytest.raises(RedriveRefused, match="in use"):
        Archive(tmp_path / "a")


def test_it_is_for_ourselves_alone(tmp_path):
    with Archive(tmp_path / "a"):
        assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


def test_a_queue_that_is_not_there_any_more_is_no_destination():
    class Broker:
        def find(self, name):
            raise RedriveRefused("There is no queue")

    route = archive.ArchiveRoute(Broker(), None)
    letter = Letter({"Body": "x", "MessageId": "a", "Destination": "http://sqs/1/gone"})
    assert route.destination(letter) is None
