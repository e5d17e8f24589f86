"""A file of JSON lines that more lines are appended to, by one process at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import BinaryIO

from .errors import RedriveRefused

__all__ = ["open_lines"]

_CHUNK_BYTES = 65_536


def open_lines(path: Path, *, begins: bytes, what: str) -> BinaryIO:
    """Open a file of ours for reading and appending; make it if it is not there, for us alone.

    A last line that a kill has cut short is removed: what would be appended to it were lost with
    it.

    Arguments:
        begins: the first bytes of such a file.
        what: it is, for people.

    Raises:
        RedriveRefused: it cannot be opened, is in use, or is something else; then it is left as it
            is.
    """
    try:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "a+b")
    except OSError as exc:
        raise RedriveRefused(f"Cannot write {what} {path}: {exc.strerror}.") from exc
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            raise RedriveRefused(f"{what.capitalize()} {path} is in use by another run.") from exc
        file.seek(0)
        head = file.read(len(begins))
        if head != begins[: len(head)] or (b"\n" in head):
            raise RedriveRefused(f"{path} is no {what} of a redrive. Name another file.")
        _remove_what_was_cut_short(file)
    except BaseException:
        file.close()
        raise
    return file


def _remove_what_was_cut_short(file: BinaryIO) -> None:
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
