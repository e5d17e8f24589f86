"""``make room`` runs the tests of a room. A room is a part of the package, such as ``redrive``."""

import pytest

from tests import rooms
from tests.support.cases import cases


def test_complete():
    """Each test file belongs to a room, and each room has tests."""
    found = [set(rooms.test_files(room)) for room in rooms.ROOMS]
    assert all(found)
    assert set.union(*found) == set(rooms.TESTS.rglob("test_*.py"))


@cases(
    "file expected",
    {
        "folder": ("unit/provider/test_rate.py", {"provider"}),
        "name": ("integration/test_redrive_canvas.py", {"redrive"}),
        "runs-a-worker": ("acceptance/test_chaos.py", {"worker"}),
        "imports": ("unit/test_decision.py", {"retry"}),
        "neither": ("unit/test_hazards.py", {"house"}),
    },
)
def test_rooms_of_file(file, expected):
    """A test file belongs to a room by its folder or name, or else by what it runs or imports."""
    assert rooms.rooms_of(rooms.TESTS / file) == expected


def test_unknown_room():
    """A misspelt room ends the command with one line that names the rooms."""
    with pytest.raises(SystemExit) as ended:
        rooms.main(["redriv"])
    [line] = str(ended.value).splitlines()
    assert line == f"invalid room 'redriv': expected one of {', '.join(rooms.ROOMS)}"
