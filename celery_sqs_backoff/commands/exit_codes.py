"""The exit codes of all commands, in one table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

DONE: Final = 0
#: The result needs a person's attention. Each command's help says which result this is.
FOUND: Final = 1
#: The user has to correct the input. click uses the same code for a wrong option.
USAGE: Final = 2
GATE: Final = 3
POISON: Final = 4
UNREACHABLE: Final = 5
INCOMPLETE: Final = 6
NOTHING_MATCHED: Final = 7
INTERRUPTED: Final = 130

#: The meanings of codes in the help, unless a command gives its own meaning.
MEANINGS: Final[Mapping[int, str]] = {
    DONE: "done",
    USAGE: "wrong options, settings or app",
    GATE: "stopped by the probe, or because messages came back",
    POISON: "messages were left that came back or were replayed too often",
    UNREACHABLE: "SQS is unreachable or denies a call",
    INCOMPLETE: "some messages could not be received",
    NOTHING_MATCHED: "no message matched",
    INTERRUPTED: "interrupted or declined",
}

#: The exit codes with which every command can end.
ALWAYS: Final = (DONE, USAGE, INTERRUPTED)
