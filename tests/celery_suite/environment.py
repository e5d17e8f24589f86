"""Make an environment per version of Celery: the released packages, and their own tests.

pip gets all of it from the package index. It stays below ``.cache/celery-suite``.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "celery-suite"

#: The versions of Celery that our package supports. kombu has the same version numbers.
LINES = ("5.5", "5.6", "5.7")

#: The packages that their tests import. Tests of the backends azure, gcs and mongodb need more
#: packages, and do not run.
_FOR_TESTS = (
    *("pytest", "pytest-celery", "pytest-timeout", "pytest-subtests", "pytest-click"),
    *("pytest-order", "pytest-rerunfailures", "hypothesis", "freezegun", "moto", "pydantic"),
    *("sqlalchemy", "redis", "cryptography", "msgpack", "pyyaml", "requests"),
)


@dataclass(frozen=True)
class Environment:
    """An environment with one version of Celery.

    Attributes:
        line: the version, such as ``5.7``.
        python: the interpreter of the environment.
    """

    line: str
    python: Path

    def source(self, package: str) -> Path:
        """Return the unpacked source distribution of ``celery`` or ``kombu``, with its tests.

        Raises:
            subprocess.CalledProcessError: pip cannot reach the package index.
        """
        version = _version(self.python, package)
        home = CACHE / self.line
        found = home / f"{package}-{version}"
        if not found.exists():
            home.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=home) as directory:
                wanted = [f"{package}=={version}", "--no-deps", "--no-binary", package]
                pip = _pip(self.python)
                subprocess.run([*pip, "download", *wanted, "--dest", directory], check=True)
                with tarfile.open(f"{directory}/{found.name}.tar.gz") as archive:
                    archive.extractall(directory, filter="data")
                Path(directory, found.name).rename(found)
        return found


def installed() -> Environment:
    """Return the environment that this process runs in."""
    python = Path(sys.executable)
    return Environment(_version(python, "celery").rpartition(".")[0], python)


def environment(line: str) -> Environment:
    """Return the environment of a version of Celery. The first call makes it, which takes minutes.

    Raises:
        subprocess.CalledProcessError: pip cannot reach the package index, or refuses.
    """
    home = CACHE / line
    python = home / "venv" / "bin" / "python"
    if not (home / "made").exists():
        major, minor = map(int, line.split("."))
        following = f"{major}.{minor + 1}"
        released = [f"celery[sqs]>={line},<{following}", f"kombu>={line},<{following}"]
        subprocess.run([sys.executable, "-m", "venv", str(home / "venv")], check=True)
        subprocess.run([*_pip(python), "install", *released, *_FOR_TESTS], check=True)
        (home / "made").touch()
    return Environment(line, python)


def _pip(python: Path) -> list[str]:
    return [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]


def _version(python: Path, package: str) -> str:
    command = [str(python), "-c", f"import {package}; print({package}.__version__)"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
