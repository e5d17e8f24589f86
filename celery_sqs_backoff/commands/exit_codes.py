"""The exit codes of all commands, in one table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

DONE: Final = 0
#: A person must look at the result. Each command's help says which result this is.
FOUND: Final = 1
#: The user has to correct the input. click uses the same code for a wrong option.
USAGE: Final = 2
GATE: Final = 3
POISON: Final = 4
UNREACHABLE: Final = 5
INCOMPLETE: Final = 6
NOTHING_MATCHED: Final = 7
INTERRUPTED: Final = 130

#: The meanings of codes in a command's help, unless the command has its own words.
MEANINGS: Final[Mapping[int, str]] = {
    DONE: "done",
    USAGE: "wrong options, settings or app",
    GATE: "stopped by the probe or by returning messages",
    POISON: "poison was left",
    UNREACHABLE: "SQS is unreachable or refuses",
    INCOMPLETE: "not complete",
    NOTHING_MATCHED: "no message matched",
    INTERRUPTED: "interrupted or declined",
}

#: Every command can end with these.
ALWAYS: Final = (DONE, USAGE, INTERRUPTED)
