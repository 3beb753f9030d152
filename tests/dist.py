"""Check what is in dist/, then install the wheel away from the checkout and use it.

Needs the sdist and the wheel in dist/ (`make dist` builds them), pip and git. Exit status 1 if
something is wrong.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterable, Sequence
from email import message_from_string
from json import dumps
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "langchain_quota"
DIST_INFO = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
DEMO_SECONDS = 3

LINK = re.compile(r"\]\(([^)\s]+)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
"""What a Markdown link leads to: inline, or by reference."""

IMPORT = f"""
import importlib.util, sys
import {PACKAGE}, {PACKAGE}.testing
extras = ("opentelemetry.sdk", "redis", "rich")
print({PACKAGE}.__version__, {PACKAGE}.__file__)
print(*(name for name in extras if importlib.util.find_spec(name)))
"""


class DistError(Exception):
    """What was built cannot be released; the message says why."""


def package_files(root: Path) -> dict[str, bytes]:
    """What the wheel has to hold of the package, by its name there."""
    sources = root / "src"
    files = {
        path.relative_to(sources).as_posix(): path.read_bytes()
        for path in (sources / PACKAGE).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    for path in (root / "dashboards" / "grafana").glob("*.json"):
        files[f"{PACKAGE}/monitoring/dashboards/{path.name}"] = path.read_bytes()
    return files


def wheel_faults(wheel: Path, expected: dict[str, bytes], version: str) -> list[str]:
    """What is wrong with the content of a wheel."""
    info = f"{PACKAGE}-{version}.dist-info/"
    with ZipFile(wheel) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    faults = differences(held, [*expected, *(info + name for name in DIST_INFO)], "the wheel")
    faults += [
        f"{name} is not that of the checkout"
        for name, content in expected.items()
        if held.get(name, content) != content
    ]
    description = message_from_string(held.get(info + "METADATA", b"").decode()).get_payload()
    targets = (first or second for first, second in LINK.findall(str(description)))
    faults += [
        f"a link of the README leads nowhere on a package index: {target}"
        for target in targets
        if not target.startswith(("https://", "#"))
    ]
    return faults


def sdist_faults(sdist: Path, expected: Iterable[str]) -> list[str]:
    """What is wrong with the content of an sdist: it is the repository, without its history."""
    with tarfile.open(sdist) as archive:
        held = [each.name.partition("/")[2] for each in archive.getmembers() if each.isfile()]
    return differences(held, [*expected, "PKG-INFO"], "the sdist")


def differences(held: Iterable[str], expected: Iterable[str], where: str) -> list[str]:
    """What is missing, and what should not be there."""
    missing, surplus = {*expected} - {*held}, {*held} - {*expected}
    return [
        *(f"{name} is missing in {where}" for name in sorted(missing)),
        *(f"{name} should not be in {where}" for name in sorted(surplus)),
    ]


def version_faults(version: str, built: str, changelog: str, tags: Sequence[str]) -> list[str]:
    """What is wrong with the version: it is one, and a tagged commit is the release of it."""
    faults = []
    if built != version:
        faults.append(f"dist/ holds version {built}, and the package says {version}")
    found = re.search(r"^## \[([^\]]+)\]", changelog, re.MULTILINE)
    newest = found[1] if found else "nothing"
    releases = [tag for tag in tags if re.fullmatch(r"v\d.*", tag)]
    if newest not in ({version} if releases else {version, "Unreleased"}):
        faults.append(f"CHANGELOG.md begins with {newest}, and the package says {version}")
    faults += [
        f"the commit has the tag {tag}, and the package says {version}"
        for tag in releases
        if tag != f"v{version}"
    ]
    return faults


def check_dist(dist: Path) -> Path:
    """Check what was built; the wheel.

    Raises:
        DistError: Something is wrong with it.
    """
    wheels, sdists = sorted(dist.glob("*.whl")), sorted(dist.glob("*.tar.gz"))
    if (len(wheels), len(sdists)) != (1, 1):
        raise DistError(f"{dist} holds {len(wheels)} wheels and {len(sdists)} sdists, not one each")
    [wheel], [sdist] = wheels, sdists
    stated = (ROOT / "src" / PACKAGE / "_version.py").read_text()
    version = stated.partition('__version__ = "')[2].partition('"')[0]
    built = wheel.name.split("-")[1]
    files = [
        name
        for name in run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
        if (ROOT / name).is_file()
    ]
    faults = [
        *version_faults(
            version,
            built,
            (ROOT / "CHANGELOG.md").read_text(),
            run("git", "tag", "--points-at", "HEAD", cwd=ROOT),
        ),
        *wheel_faults(wheel, package_files(ROOT), built),
        *sdist_faults(sdist, files),
    ]
    if faults:
        raise DistError("\n".join(faults))
    print(f"dist/ holds {wheel.name} and {sdist.name}: {len(files)} files of the repository")
    return wheel


class Elsewhere:
    """A fresh environment in a directory away from the checkout, with the wheel installed.

    Args:
        directory: Where it is made.
        requirement: The wheel, with its extras.
    """

    def __init__(self, directory: Path, requirement: str) -> None:
        self.directory = directory
        self._bin = directory / ".venv" / "bin"
        directory.mkdir()
        run(sys.executable, "-m", "venv", str(self._bin.parent), cwd=directory)
        self.install("--upgrade", "pip")
        self.install(requirement)

    def install(self, *arguments: str) -> None:
        """Install packages, in the versions that CI has."""
        pip = ("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        self.run(*pip, "-c", str(ROOT / "constraints.txt"), *arguments)

    def run(self, command: str, *arguments: str, status: int = 0) -> list[str]:
        """Run one of its commands; the lines of what it writes.

        Raises:
            DistError: It ends with another status.
        """
        return run(str(self._bin / command), *arguments, cwd=self.directory, status=status)


def run(*command: str, cwd: Path, status: int = 0) -> list[str]:
    """Run a command, as far as it goes apart from the caller's settings; the lines it writes.

    Raises:
        DistError: It ends with another status.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in {"PIP_CONSTRAINT", "PYTHONPATH", "VIRTUAL_ENV"}
        and not name.startswith(("LANGCHAIN_QUOTA_", "OTEL_", "PROMETHEUS_"))
    }
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**inherited, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != status:
        raise DistError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout.splitlines()


def expect(text: str, lines: Sequence[str]) -> None:
    """Check that a command wrote a text.

    Raises:
        DistError: It did not.
    """
    if not any(text in line for line in lines):
        raise DistError(f"{text!r} is missing in:\n" + "\n".join(lines))


def try_bare(directory: Path, wheel: Path) -> None:
    """The wheel without extras: it is imported, exports, and says what the extras are for.

    Raises:
        DistError: It does not.
    """
    bare = Elsewhere(directory, str(wheel))
    version = wheel.name.split("-")[1]
    imported, extras = bare.run("python", "-I", "-c", IMPORT)
    expect(f"{version} {directory}", [imported])
    if extras:
        raise DistError(f"without extras there are {extras}")
    expect(version, bare.run("langchain-quota", "--version"))
    for what in ("grafana", "prometheus", "alertmanager"):
        bare.run("langchain-quota", "export", what, "--to", what)
    for board in (ROOT / "dashboards" / "grafana").glob("*.json"):
        if not (directory / "grafana" / board.name).is_file():
            raise DistError(f"export grafana does not write {board.name}")
    expect("langchain-quota[demo]", bare.run("langchain-quota", "demo", status=2))
    expect("langchain-quota[redis]", bare.run("langchain-quota", "quotas", "show", status=2))
    print("the bare wheel is imported, exports, and names its extras")


def try_demo(directory: Path, wheel: Path) -> None:
    """The wheel with the extra `demo`: the demo runs, and the public API has the types it says.

    Raises:
        DistError: It does not.
    """
    demo = Elsewhere(directory, f"{wheel}[demo]")
    lines = demo.run("langchain-quota", "demo", "--seconds", str(DEMO_SECONDS), "--port", "0")
    expect("langchain_quota_calls_total{", lines)
    print(f"the demo runs for {DEMO_SECONDS} seconds")

    # What users of the API have beside it.
    demo.install("redis", "starlette", "--group", f"{ROOT / 'pyproject.toml'}:lint")
    shutil.copytree(
        ROOT / "tests" / "typing", directory / "api", ignore=shutil.ignore_patterns("__pycache__")
    )
    demo.run("mypy", "--config-file=", "--strict", "--warn-unreachable", "api")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    (directory / "pyrightconfig.json").write_text(dumps({**settings, "include": ["api"]}))
    python = demo.run("python", "-c", "import sys; print(sys.executable)")
    demo.run("pyright", "--pythonpath", *python)
    print("mypy and pyright agree with tests/typing")


def main() -> int:
    """Check what was built, and use it."""
    try:
        wheel = check_dist(ROOT / "dist")
        with TemporaryDirectory() as temporary:
            directory = Path(temporary).resolve()
            try_bare(directory / "bare", wheel)
            try_demo(directory / "demo", wheel)
    except DistError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
