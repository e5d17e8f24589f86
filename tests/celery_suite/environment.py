"""An environment per line of Celery: the released packages, and the tests of their authors.

All of it comes from the package index by pip, and stays below ``.cache/celery-suite``.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LINES", "ROOT", "Environment", "environment"]

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "celery-suite"

#: Lines of Celery that the package supports; kombu's are the same.
LINES = ("5.5", "5.6", "5.7")

#: What their tests import. Those of backends that need more (azure, gcs, mongodb) do not run.
_FOR_TESTS = (
    *("pytest", "pytest-celery", "pytest-timeout", "pytest-subtests", "pytest-click"),
    *("pytest-order", "pytest-rerunfailures", "hypothesis", "freezegun", "moto", "pydantic"),
    *("sqlalchemy", "redis", "cryptography", "msgpack", "pyyaml", "requests"),
)


@dataclass(frozen=True)
class Environment:
    """One line of Celery, installed.

    Attributes:
        line: as ``5.7``.
        python: the interpreter of its virtual environment.
        celery, kombu: the unpacked source distributions, which have the tests.
    """

    line: str
    python: Path
    celery: Path
    kombu: Path


def environment(line: str) -> Environment:
    """Return the environment of a line; the first time it is made, which takes minutes.

    Raises:
        subprocess.CalledProcessError: pip cannot reach the package index, or refuses.
    """
    home = CACHE / line
    python = home / "venv" / "bin" / "python"
    if not (home / "made").exists():
        _make(line, home, python)
        (home / "made").touch()
    return Environment(line, python, _source(home, "celery"), _source(home, "kombu"))


def _make(line: str, home: Path, python: Path) -> None:
    major, minor = map(int, line.split("."))
    following = f"{major}.{minor + 1}"
    subprocess.run([sys.executable, "-m", "venv", str(home / "venv")], check=True)
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    released = [f"celery[sqs]>={line},<{following}", f"kombu>={line},<{following}"]
    subprocess.run([*pip, "install", *released, *_FOR_TESTS], check=True)
    for package in ("celery", "kombu"):
        version = subprocess.run(
            [str(python), "-c", f"import {package}; print({package}.__version__)"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        source = [f"{package}=={version}", "--no-deps", "--no-binary", package]
        subprocess.run([*pip, "download", *source, "--dest", str(home)], check=True)
        with tarfile.open(home / f"{package}-{version}.tar.gz") as archive:
            archive.extractall(home, filter="data")


def _source(home: Path, package: str) -> Path:
    [found] = [path for path in home.glob(f"{package}-*") if path.is_dir()]
    return found
