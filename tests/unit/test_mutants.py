"""``make mutants`` changes the source in one place at a time, and looks for a test that fails.

A changed source is a mutant.
"""

import ast

import pytest

from tests.mutants import mutate
from tests.support.cases import cases


@pytest.fixture
def changes(tmp_path, monkeypatch):
    """Return a function that lists the mutants of a source, each as the line that it changes."""
    monkeypatch.setattr(mutate, "PACKAGE", tmp_path)

    def changes(source):
        (tmp_path / "room").mkdir(exist_ok=True)
        (tmp_path / "room" / "module.py").write_text(source)
        before = ast.unparse(ast.parse(source)).splitlines()
        for mutant in mutate.draw("room", 100, seed=0):
            after = ast.unparse(mutate.planted(mutant)).splitlines()
            assert len(after) == len(before)
            [changed] = [new for old, new in zip(before, after, strict=True) if old != new]
            yield changed.strip()

    return lambda source: list(changes(source))


@cases(
    "source expected",
    {
        "comparison": ("a < b", ["a <= b"]),
        "boolean": ("a or b", ["a and b"]),
        "not": ("not a", ["a"]),
        "flag": ("a = True", ["a = False"]),
        "number": ("a = 0.5", ["a = 1.5"]),
        "dropped-call": ("call(a)", ["pass"]),
        "return-value": ("def f():\n    return a", ["return None"]),
        "branch": ("if a:\n    b", ["if not a:"]),
        "loop": ("while f(1):\n    b", ["while not f(1):", "while f(2):"]),
        "annotations": ("def f(a: Literal[1]) -> 2:\n    return None", []),
        "code-for-types": ("if TYPE_CHECKING:\n    f()", []),
    },
)
def test_one_change(changes, source, expected):
    """A mutant changes one comparison, boolean, number, call, return value or branch."""
    assert changes(source) == expected


def test_same_draw():
    """The same seed draws the same mutants, and another seed draws others. All of them compile."""
    drawn = mutate.draw("provider", 5, seed=1)
    assert drawn == mutate.draw("provider", 5, seed=1) != mutate.draw("provider", 5, seed=2)
    for mutant in drawn:
        compile(mutate.planted(mutant), mutant.file, "exec")
