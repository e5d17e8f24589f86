"""Tells a running task that its worker lost the lease on its message.

The task may run in another process, which may have been forked before the message was received, or
spawned. What both have is the file system: the flag is a file that exists. None is made before
something is lost.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from uuid import uuid4

from celery.utils.log import get_logger

from ..text import error_site

logger = get_logger(__name__)


class LostFlags:
    """Flags of one worker, in a directory that is its own."""

    def __init__(self) -> None:
        # Not to be guessed: on a shared /tmp, nobody else may raise our flags.
        name = f"celery-sqs-backoff-{uuid4().hex}"
        self.directory = os.path.join(tempfile.gettempdir(), name)

    @staticmethod
    def set(path: str) -> None:
        """Raise a flag. A full or read-only disk is logged, and the task is not told."""
        try:
            Path(path).parent.mkdir(mode=0o700, exist_ok=True)
            Path(path).touch()
        except OSError as exc:
            logger.error("sqs_backoff.flag_failed: %s", error_site(exc))

    def clear(self) -> None:
        """Remove all flags."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.directory)
