"""Check the last commit before a release. ``make release-check`` runs this, and leaves ``dist/``.

1. Two builds of the last commit give the same files, and the package index can show them.
2. The wheel works without extras, and with each extra, each time in a new environment.
3. Each public name of the last tag still exists, or the changelog names it.
4. mypy and pyright know the types of the public names, as users' code needs them.
"""

from __future__ import annotations

import ast
import configparser
import gzip
import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "celery_sqs_backoff"
BIN = Path(sys.executable).parent

#: The public modules. A release must not lose a name from their ``__all__``.
PUBLIC = ("", "classifiers", "foreign", "provider_proxy", "redrive", "safe", "signals", "testing")

#: For each extra, code that must run with it. Without an extra, ``tests/bare.py`` must run.
USES = {
    "django": "import django; import celery_sqs_backoff.contrib.django.apps",
    "redis": "import redis; import celery_sqs_backoff.store.redis",
    "dynamodb": "import boto3; import celery_sqs_backoff.store.dynamodb",
    "prometheus": "import prometheus_client; import celery_sqs_backoff.observe.metrics",
    "plot": "import matplotlib",
    "testing": "import moto.server; import celery_sqs_backoff.testing",
}


def run(*words: object, **environment: str) -> str:
    """Run a program and return what it prints.

    Raises:
        SystemExit: the program failed. Its output is printed.
    """
    done = subprocess.run(
        [str(word) for word in words],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}\n{' '.join(map(str, words))}: exit code {done.returncode}")
    return done.stdout


def build(into: Path, epoch: int) -> dict[str, str]:
    """Build both distributions of the last commit, and return their hashes by name."""
    with tempfile.TemporaryDirectory() as export:
        archive = Path(export) / "commit.tar"
        run("git", "archive", "-o", archive, "--prefix=source/", "HEAD")
        with tarfile.open(archive) as packed:
            packed.extractall(export, filter="data")
        source_tree = Path(export) / "source"
        run(sys.executable, "-m", "build", "-o", into, source_tree, SOURCE_DATE_EPOCH=str(epoch))
    [source] = into.glob("*.tar.gz")
    make_reproducible(source, epoch)
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in into.iterdir()}


def make_reproducible(source: Path, epoch: int) -> None:
    """Give all files of a source distribution the same time and no owner."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(source) as packed:
            packed.extractall(folder, filter="data")
        with (
            source.open("wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=epoch) as zipped,
            tarfile.open(fileobj=zipped, mode="w") as packed,
        ):
            for path in sorted(Path(folder).rglob("*")):
                entry = packed.gettarinfo(path, path.relative_to(folder))
                entry.mtime, entry.uid, entry.gid = epoch, 0, 0
                entry.uname = entry.gname = ""
                entry.mode = 0o755 if entry.isdir() else 0o644
                with path.open("rb") if entry.isfile() else open(os.devnull, "rb") as content:
                    packed.addfile(entry, content)


def public_names(read: object) -> Iterator[str]:
    """Yield the names in ``__all__`` of the public modules.

    ``read`` returns the source at a path in the package, or an empty text.
    """
    for module in PUBLIC:
        paths = [f"{module}/__init__.py", f"{module}.py"] if module else ["__init__.py"]
        source = next((text for path in paths if (text := read(path))), "")  # type: ignore[operator]
        for node in ast.parse(source).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                prefix = f"{module}." if module else ""
                yield from (prefix + name for name in ast.literal_eval(node.value))


def of_the_tree(path: str) -> str:
    file = PACKAGE / path
    return file.read_text() if file.exists() else ""


def of_the_tag(tag: str, path: str) -> str:
    done = subprocess.run(
        ["git", "show", f"{tag}:celery_sqs_backoff/{path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return done.stdout


def check_names() -> None:
    """Compare the public names with those of the last tag.

    Raises:
        SystemExit: a name of the last tag is missing, and the changelog does not name it.
    """
    names = set(public_names(of_the_tree))
    tags = run("git", "tag", "--list", "v*", "--sort=-v:refname").split()
    if not tags:
        print(f"names: {len(names)} public ones; there is no tag to compare with")
        return
    gone = set(public_names(lambda path: of_the_tag(tags[0], path))) - names
    changes = (ROOT / "CHANGELOG.md").read_text()
    unsaid = sorted(name for name in gone if name.rpartition(".")[2] not in changes)
    if unsaid:
        raise SystemExit(f"gone since {tags[0]}, and not in the changelog: {', '.join(unsaid)}")
    print(f"names: {len(names)} public ones; gone since {tags[0]}: {sorted(gone) or 'none'}")


def check_addresses(metadata: configparser.SectionProxy) -> None:
    """Check that the links in README.md work on the package index.

    Raises:
        SystemExit: setup.cfg has ``project_urls``, but links in README.md are paths.
    """
    if "project_urls" not in metadata:
        print("index: do not upload yet: setup.cfg has no project_urls")
        return
    by_path = re.findall(r"\]\((?!https://)([^)]+)\)", (ROOT / "README.md").read_text())
    if by_path:
        raise SystemExit(f"README.md: expected links with an address: {', '.join(by_path)}")


def check_wheel(wheel: Path, extra: str, folder: Path) -> Path:
    """Install the wheel with an extra into a new environment, and return its interpreter."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    requirement = f"celery-sqs-backoff[{extra}] @ file://{wheel}" if extra else str(wheel)
    run(python, "-m", "pip", "install", "--quiet", requirement)
    run(python, "-m", "pip", "check")
    if extra:
        run(python, "-I", "-c", USES[extra])
        shown = run(folder / "bin" / "celery", "--help")
        assert "sqs-redrive" in shown, shown
    else:
        run(python, "-I", ROOT / "tests" / "bare.py")
    print(f"wheel: works with {extra or 'no extra'}")
    return python


def share_of_known_types(python: Path) -> str:
    """Return the share of the package's symbols whose types pyright knows, such as 90%."""
    folder = python.parents[1]
    done = subprocess.run(
        [BIN / "pyright", "--verifytypes", "celery_sqs_backoff", "--ignoreexternal"],
        cwd=folder,
        env={**os.environ, "VIRTUAL_ENV": str(folder), "PATH": f"{python.parent}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    found = re.search(r"completeness score: (\S+)", done.stdout)
    assert found, done.stdout
    return found[1]


def main() -> None:
    """Run all checks. The first check that fails ends the program."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = set(setup["options.extras_require"]) - {"dev", "demo", "docs", "release"}
    assert extras == USES.keys(), extras
    epoch = int(run("git", "log", "-1", "--format=%ct"))
    dist = ROOT / "dist"
    for old in dist.glob("*"):
        old.unlink()
    with tempfile.TemporaryDirectory() as again:
        first, second = build(dist, epoch), build(Path(again), epoch)
    if first != second:
        raise SystemExit(f"two builds differ: {first} and {second}")
    for name, digest in sorted(first.items()):
        print(f"build: {digest}  {name}")
    run(BIN / "twine", "check", "--strict", *dist.iterdir())
    [wheel] = dist.glob("*.whl")
    # W004 forbids file names that cannot be imported by name, such as 0001_x.py. Django's
    # migrations have such names.
    run(BIN / "check-wheel-contents", "--ignore", "W004", wheel)
    print("index: it can show the description, and the wheel has the right files")
    check_addresses(setup["metadata"])
    check_names()
    run(BIN / "mypy")
    run(BIN / "pyright", "tests/typing")
    with tempfile.TemporaryDirectory() as environments:
        for extra in ("", *sorted(extras)):
            python = check_wheel(wheel, extra, Path(environments) / (extra or "none"))
            if not extra:
                print(f"types: {share_of_known_types(python)} of all symbols are known")
    print("All checks have passed.")


if __name__ == "__main__":
    main()
