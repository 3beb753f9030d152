"""Do with the files in dist/ what the README shows, in another place.

Every shell block of the README runs unchanged in a clone of this checkout's last commit; the wheel
is installed elsewhere. Exit status 1 if something is wrong.
"""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from json import dumps
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "langchain_quota"
REPOSITORY = "langchain-quota/langchain-quota"

ADDED = {
    # The default port may be taken here, and the traffic need not be long.
    "make demo": ' ARGS="--port 0 --seconds 1"',
    # CI runs them all.
    "make test": ' ARGS="tests/cli/test_export.py"',
}
"""What is added to lines of the README, and why."""

EXPECTED = {
    "make demo": r"^Installing the demo(?s:.)* \.venv/bin/langchain-quota demo --serve$",
    "make test": r"^=+ \d+ passed",
}
"""What a line of the README prints."""

BARE = f"""
import importlib.util
import {PACKAGE}, {PACKAGE}.testing
print({PACKAGE}.__version__, {PACKAGE}.__file__)
extras = ("genai_prices", "opentelemetry.sdk", "psycopg", "redis")
assert not any(map(importlib.util.find_spec, extras)), "there are extras"
"""
PRICES = f"import {PACKAGE} as q; q.QuotaMiddleware([q.CostLimit(run_limit=1)])"


class DistError(Exception):
    """What was built cannot be released; the message says why."""


def check_version(version: str) -> None:
    """Check that the changelog has the version, and that a tag names it.

    Raises:
        DistError: Another one.
    """
    changelog = (ROOT / "CHANGELOG.md").read_text()
    newest = re.findall(r"^## \[(.+?)\]", changelog, re.MULTILINE)[0]
    tags = [each for each in run("git", "tag", "--points-at", "HEAD") if re.match(r"v\d", each)]
    if newest not in ({version} if tags else {version, "Unreleased"}) or {*tags} - {f"v{version}"}:
        raise DistError(f"the package says {version}, CHANGELOG.md {newest}, and the tags {tags}")


def check_reproducible(directory: Path) -> None:
    """Build again, and check that every file is equal byte by byte.

    Raises:
        DistError: A file differs, or is missing.
    """
    constraints = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    run(sys.executable, "-m", "build", "--outdir", str(directory), settings=constraints)
    built, again = (
        {path.name: path.read_bytes() for path in folder.iterdir()}
        for folder in (ROOT / "dist", directory)
    )
    if built != again:
        different = [name for name in built | again if built.get(name) != again.get(name)]
        raise DistError(f"a second build differs: {', '.join(different)}")
    print("a second build is equal, byte by byte")


def run(
    *command: str, cwd: Path = ROOT, status: int = 0, settings: Mapping[str, str] | None = None
) -> list[str]:
    """Run a command without the caller's settings; the lines that it writes.

    Raises:
        DistError: It ends with another status.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in {"PIP_CONSTRAINT", "PYTHONPATH", "VIRTUAL_ENV"}
        and not name.startswith(("LANGCHAIN_QUOTA_", "MAKE", "MFLAGS", "OTEL_", "PROMETHEUS_"))
    }
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**inherited, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1", **(settings or {})},
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != status:
        raise DistError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout.splitlines()


class Elsewhere:
    """A directory away from the checkout, with a fresh environment.

    What is installed in it has the versions that CI has, and this package is the wheel.

    Args:
        directory: Where it is made.
        wheel: What was built.
    """

    def __init__(self, directory: Path, wheel: Path) -> None:
        self.directory = directory
        directory.mkdir()
        run(sys.executable, "-m", "venv", ".venv", cwd=directory)
        ours = directory / "ours.txt"
        ours.write_text(f"langchain-quota @ {wheel.as_uri()}\n")
        self.settings = {
            "PATH": f"{directory / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PIP_CONSTRAINT": f"{ROOT / 'constraints.txt'} {ours}",
        }
        self.run("pip install --quiet --disable-pip-version-check --upgrade pip")

    def run(self, line: str, *arguments: str, status: int = 0, says: str = "") -> None:
        """Run a command as a user does who has activated the environment.

        Raises:
            DistError: It ends with another status, or does not say what it should.
        """
        # The program is looked up on the new PATH.
        command = ("env", *line.split(), *arguments)
        output = run(*command, cwd=self.directory, status=status, settings=self.settings)
        if says not in "\n".join(output):
            raise DistError("\n".join([f"{says!r} is missing in:", *output]))


def readme() -> list[str]:
    """The lines of the README's shell blocks."""
    blocks = re.findall(r"```shell\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return [line.partition("  #")[0].strip() for line in "".join(blocks).splitlines()]


def check_links(wheel: Path) -> None:
    """Check that the description that an index shows has absolute links, and ours lead to files.

    Raises:
        DistError: A link is relative, or leads to nothing.
    """
    with ZipFile(wheel) as archive:
        [metadata] = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode().partition("\n\n")[2]
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    targets = re.findall(
        r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$|(?:src|srcset|href)=\"([^\"]+)\"", text, re.MULTILINE
    )
    links = ["".join(target) for target in targets]
    ours = [re.split(rf"{REPOSITORY}/(?:blob/)?main/", link) for link in links]
    wrong = [
        "".join(parts)
        for parts in ours
        if not parts[0].startswith("https://")
        or (len(parts) == 2 and not (ROOT / parts[1].partition("#")[0]).is_file())  # noqa: PLR2004
    ]
    if wrong or not links:
        raise DistError(f"links of the wheel's description that lead nowhere: {wrong}")
    print(f"the {len(links)} links of the wheel's description are absolute and lead to files")


def first_example() -> str:
    """Return the README's first example."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return "" if found is None else found[1]


def shell(lines: Sequence[str], cwd: Path, settings: Mapping[str, str]) -> None:
    """Run lines in one shell, each of which has to succeed and to print what is expected.

    Raises:
        DistError: One fails, or does not print what it should.
    """
    script = "".join(f"echo '<<<'\n{line}{ADDED.get(line, '')}\n" for line in lines)
    output = "\n".join(run("bash", "-eu", "-c", script, cwd=cwd, settings=settings))
    for line, text in zip(lines, output.split("<<<\n")[1:], strict=True):
        if not re.search(EXPECTED.get(line, ""), text, re.MULTILINE):
            raise DistError(f"{line} of the README printed:\n{text.strip()}")


def try_installed(directory: Path, wheel: Path, version: str) -> None:
    """Install the wheel away from the checkout, and use it.

    Without extras, the wheel runs the README's first example, exports, runs the demo, and names the
    extra that a command needs. The public API has its documented types.
    """
    there = Elsewhere(directory, wheel)
    there.run("pip install --quiet langchain-quota")
    there.run(
        "langchain-quota demo --port 0 --seconds 3", says="Watch them live in a browser: http"
    )
    there.run("python -I -c", BARE, says=f"{version} {directory}")
    there.run("python -I -c", first_example(), says="\nTool call limit exceeded. Do not call")
    there.run("langchain-quota --version", says=version)
    for what in ("prometheus", "alertmanager", "grafana"):
        there.run(f"langchain-quota export {what} --to bare")
    for board in (ROOT / "dashboards" / "grafana").glob("*.json"):
        there.run(f"test -f bare/{board.name}")
    show = "langchain-quota quotas show --store redis://127.0.0.1"
    there.run(show, status=2, says="langchain-quota[redis]")
    there.run("python -I -c", PRICES, status=1, says="langchain-quota[cost]")
    print("the bare wheel runs the first example, exports, and names its extras")
    check_types(there)
    print("mypy and pyright agree with tests/typing")


def check_types(there: Elsewhere) -> None:
    """Check the public API as users type it."""
    # Packages that users of the API have, too.
    lint = f"{ROOT / 'pyproject.toml'}:lint"
    there.run(
        f"pip install --quiet opentelemetry-sdk psycopg[binary,pool] redis starlette --group {lint}"
    )
    there.run(f"cp -r {ROOT / 'tests' / 'typing'} api")
    there.run("mypy --config-file= --strict --warn-unreachable api")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    (there.directory / "pyrightconfig.json").write_text(dumps({**settings, "include": ["api"]}))
    there.run("pyright --pythonpath .venv/bin/python")


def try_cloned(directory: Path) -> None:
    """Do with a clone of this checkout what the README does with one."""
    clone, environment = directory / "clone", directory / "environment"
    run("git", "clone", "--quiet", ROOT.as_uri(), str(clone))
    # What a user has: a recent `python3`, and an environment for a project of her own.
    run(sys.executable, "-m", "venv", str(environment))
    settings = {
        "PATH": os.pathsep.join([str(environment / "bin"), os.environ["PATH"]]),
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
    }
    shell(readme(), clone, settings)
    print("the README's lines run in a clone")


def main() -> int:
    """Use what was built."""
    [wheel] = (ROOT / "dist").glob("*.whl")
    version = wheel.name.split("-")[1]
    try:
        check_version(version)
        with TemporaryDirectory() as temporary:
            directory = Path(temporary).resolve()
            check_reproducible(directory / "again")
            check_links(wheel)
            try_installed(directory / "installed", wheel, version)
            try_cloned(directory / "home")
    except DistError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
