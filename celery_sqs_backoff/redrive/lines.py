"""A file of JSON lines that more lines are appended to, by one process at a time.

It is the operator's alone. A file that other users could have written, or could read, is refused. A
planted journal would make a run delete messages that were never sent.
"""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from .errors import RedriveRefused

_CHUNK_BYTES = 65_536


def open_lines(path: Path, *, begins: bytes, what: str) -> BinaryIO:
    """Open a file of ours for reading and appending. Create it for us alone if it is missing.

    Removes a last line that a kill has truncated: it would corrupt the next record.

    Arguments:
        begins: the first bytes of the file.
        what: the kind of file, for people.

    Raises:
        RedriveRefused: it cannot be opened, is in use, belongs to others or can be read or written
            by them, is a link, or is something else. The file is not changed then.
    """
    file = _open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, "a+b", what)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise RedriveRefused(f"{what.capitalize()} {path} is in use by another run.") from exc
        except OSError as exc:  # some network file systems have no locks
            raise RedriveRefused(
                f"Cannot lock {what} {path}: {exc.strerror}. Name one on another disk."
            ) from exc
        file.seek(0)
        head = file.read(len(begins))
        if head != begins[: len(head)] or (b"\n" in head):
            raise RedriveRefused(f"{path} is not a redrive {what}. Name another file.")
        _remove_truncated_line(file)
    except BaseException:  # an open file stays locked
        file.close()
        raise
    return file


def close_lines(file: BinaryIO) -> None:
    """Close the file. A write that a full disk refused was reported; this tries it again."""
    with suppress(OSError):
        file.close()


def open_to_read(path: Path, *, what: str) -> BinaryIO:
    """Open a file of ours for reading. Refuses what :func:`open_lines` refuses for its owner."""
    return _open(path, os.O_RDONLY, "rb", what)


def _open(path: Path, flags: int, mode: str, what: str) -> BinaryIO:
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as exc:
        if path.is_symlink():
            raise RedriveRefused(f"{what.capitalize()} {path} is a link. Name the file.") from exc
        raise RedriveRefused(f"Cannot open {what} {path}: {exc.strerror}.") from exc
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise RedriveRefused(f"{what.capitalize()} {path} is not a file.")
        if found.st_uid != os.geteuid():
            raise RedriveRefused(f"{what.capitalize()} {path} belongs to another user.")
        if found.st_mode & 0o077:
            raise RedriveRefused(
                f"{what.capitalize()} {path} is open to other users. If it is yours: chmod 600."
            )
        return os.fdopen(descriptor, mode)  # type: ignore[return-value]  # both modes are binary
    except BaseException:  # no file object closes the descriptor yet
        os.close(descriptor)
        raise


def _remove_truncated_line(file: BinaryIO) -> None:
    end = file.seek(0, os.SEEK_END)
    start = end
    while start:
        at = max(0, start - _CHUNK_BYTES)
        file.seek(at)
        newline = file.read(start - at).rfind(b"\n")
        if newline >= 0:
            start = at + newline + 1
            break
        start = at
    if start != end:
        file.truncate(start)
