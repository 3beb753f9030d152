"""Check the files in dist/, then do everything with them that the README shows, in another place.

Every shell block of the README runs unchanged: the blocks before `git clone` with the wheel, the
later ones in a clone of this checkout.

Needs the sdist and the wheel in dist/ (`make dist` builds them), pip, git and make. Exit status 1
if something is wrong.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from json import dumps
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "langchain_quota"
DIST_INFO = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
REPOSITORY = "https://github.com/langchain-quota/langchain-quota"
REPOSITORY_NAME = "langchain-quota"

ADDED = {
    # The default port may be taken here, and the traffic need not be long.
    "langchain-quota demo": " --port 0 --seconds 3",
    "make demo": ' ARGS="--port 0 --seconds 1"',
    # CI runs them all.
    "make test": ' ARGS="tests/cli/test_export.py"',
}
"""What is added to lines of the README, and why."""

EXPECTED = {
    "langchain-quota demo": r"langchain_quota_calls_total\{(?s:.)*; none ran\.$",
    "make demo": r"^Installing the demo(?s:.)* \.venv/bin/langchain-quota top$",
    "make test": r"^=+ \d+ passed",
    "make up": r"^  Dashboards    http://localhost:",
}
"""What a line of the README prints."""

IMPORT = f"""
import importlib.util, sys
import {PACKAGE}, {PACKAGE}.testing
extras = ("genai_prices", "opentelemetry.sdk", "redis", "rich")
print({PACKAGE}.__version__, {PACKAGE}.__file__)
print(*(name for name in extras if importlib.util.find_spec(name)))
"""

PRICES = f"import {PACKAGE} as q; q.QuotaMiddleware([q.CostLimit(run_limit=1)])"


class DistError(Exception):
    """What was built cannot be released; the message says why."""


def package_files(root: Path) -> dict[str, bytes]:
    """The package's files that the wheel must have, by their name in the wheel."""
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
    return faults + [
        f"{name} is not that of the checkout"
        for name, content in expected.items()
        if held.get(name, content) != content
    ]


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


def version_faults(version: str, changelog: str, tags: Sequence[str]) -> list[str]:
    """What is wrong with the version: the changelog must have it, and a tag must name it."""
    faults = []
    found = re.search(r"^## \[([^\]]+)\]", changelog, re.MULTILINE)
    newest = found[1] if found else "nothing"
    releases = [tag for tag in tags if re.fullmatch(r"v\d.*", tag)]
    if newest not in ({version} if releases else {version, "Unreleased"}):
        faults.append(f"CHANGELOG.md begins with {newest}, and the package says {version}")
    wrong = [tag for tag in releases if tag != f"v{version}"]
    return faults + [f"the commit has the tag {tag}, and not v{version}" for tag in wrong]


def check_dist(dist: Path) -> Path:
    """Check what was built; the wheel.

    Raises:
        DistError: Something is wrong with the files.
    """
    wheels, sdists = sorted(dist.glob("*.whl")), sorted(dist.glob("*.tar.gz"))
    if (len(wheels), len(sdists)) != (1, 1):
        raise DistError(f"{dist} holds {len(wheels)} wheels and {len(sdists)} sdists, not one each")
    [wheel], [sdist] = wheels, sdists
    version = wheel.name.split("-")[1]
    tags = run("git", "tag", "--points-at", "HEAD", cwd=ROOT)
    files = repository_files()
    faults = [
        *version_faults(version, (ROOT / "CHANGELOG.md").read_text(), tags),
        *wheel_faults(wheel, package_files(ROOT), version),
        *sdist_faults(sdist, files),
    ]
    if faults:
        raise DistError("\n".join(faults))
    print(f"dist/ holds {wheel.name} and {sdist.name}: {len(files)} files of the repository")
    return wheel


def repository_files() -> list[str]:
    """The files of the repository, new ones included."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    return [name for name in listed if (ROOT / name).is_file()]


class Elsewhere:
    """A directory away from the checkout, with a fresh environment.

    What is installed in it has the versions that CI has, and this package is the wheel.

    Args:
        directory: Where it is made.
        wheel: What was built.
    """

    def __init__(self, directory: Path, wheel: Path) -> None:
        self.directory = directory
        self._bin = directory / ".venv" / "bin"
        directory.mkdir()
        run(sys.executable, "-m", "venv", str(self._bin.parent), cwd=directory)
        ours = directory / "ours.txt"
        ours.write_text(f"langchain-quota @ {wheel.as_uri()}\n")
        self._environment = {"PIP_CONSTRAINT": f"{ROOT / 'constraints.txt'} {ours}"}
        self.run("pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade", "pip")

    def install(self, *arguments: str) -> None:
        """Install packages."""
        self.run("pip", "install", "--quiet", *arguments)

    def run(self, command: str, *arguments: str, status: int = 0) -> list[str]:
        """Run one of its commands; the lines of what it writes.

        Raises:
            DistError: It ends with another status.
        """
        program = str(self._bin / command)
        return run(
            program, *arguments, cwd=self.directory, status=status, settings=self._environment
        )

    def shell(self, lines: Sequence[str]) -> None:
        """Run lines of the README as a user does who has activated the environment.

        Raises:
            DistError: One fails, or does not print what it should.
        """
        path = f"{self._bin}{os.pathsep}{os.environ['PATH']}"
        shell(lines, cwd=self.directory, settings={**self._environment, "PATH": path})


def run(
    *command: str, cwd: Path, status: int = 0, settings: Mapping[str, str] | None = None
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


def expect(text: str, lines: Sequence[str]) -> None:
    """Check that a command wrote a text.

    Raises:
        DistError: It did not.
    """
    if not any(text in line for line in lines):
        raise DistError(f"{text!r} is missing in:\n" + "\n".join(lines))


def shell_blocks(text: str) -> list[list[str]]:
    """The lines of each shell block of a document, without comments."""
    return [
        [line.partition("  #")[0].strip() for line in block.splitlines() if line.strip()]
        for block in re.findall(r"```shell\n(.*?)```", text, re.DOTALL)
    ]


def shell(lines: Sequence[str], cwd: Path, settings: Mapping[str, str]) -> None:
    """Run lines in one shell, each of which has to succeed and to print what is expected.

    Raises:
        DistError: One fails, or does not print what it should.
    """
    script = "".join(
        f"echo '<<< {number}'\n{line}{ADDED.get(line, '')}\n" for number, line in enumerate(lines)
    )
    output = "\n".join(run("bash", "-eu", "-c", script, cwd=cwd, settings=settings))
    printed = re.split(r"^<<< \d+$", output, flags=re.MULTILINE)[1:]
    for line, text in zip(lines, printed, strict=True):
        if not re.search(EXPECTED.get(line, ""), text, re.MULTILINE):
            raise DistError(f"{line} of the README printed:\n{text.strip()}")


def try_installed(directory: Path, wheel: Path) -> None:
    """Do with the wheel what the README does with the package from an index.

    Without extras, the wheel is imported, exports, and names the extra that a command needs. With
    the extra `demo`, the demo runs, and the public API has its documented types.

    Raises:
        DistError: Something does not work.
    """
    there = Elsewhere(directory, wheel)
    blocks = shell_blocks((ROOT / "README.md").read_text())
    bare, demo, *others = blocks[: cloning(blocks)]
    there.shell(bare)
    check_bare(there, wheel)
    print("the bare wheel is imported, exports, and names its extras")
    there.shell(demo)
    for block in others:
        there.shell(block)
    print("the README's lines for those who install the package run")
    check_types(there)
    print("mypy and pyright agree with tests/typing")


def check_bare(there: Elsewhere, wheel: Path) -> None:
    """Check the wheel without extras.

    Raises:
        DistError: An extra is there, another package was imported, or a command fails.
    """
    version = wheel.name.split("-")[1]
    imported, extras = there.run("python", "-I", "-c", IMPORT)
    expect(f"{version} {there.directory}", [imported])
    if extras:
        raise DistError(f"without extras there are {extras}")
    expect(version, there.run("langchain-quota", "--version"))
    for what in ("grafana", "prometheus", "alertmanager"):
        there.run("langchain-quota", "export", what, "--to", f"bare/{what}")
    for board in (ROOT / "dashboards" / "grafana").glob("*.json"):
        if not (there.directory / "bare" / "grafana" / board.name).is_file():
            raise DistError(f"export grafana does not write {board.name}")
    expect("langchain-quota[demo]", there.run("langchain-quota", "demo", status=2))
    expect("langchain-quota[top]", there.run("langchain-quota", "top", status=2))
    expect("langchain-quota[redis]", there.run("langchain-quota", "quotas", "show", status=2))
    expect("langchain-quota[cost]", there.run("python", "-I", "-c", PRICES, status=1))


def check_types(there: Elsewhere) -> None:
    """Check the public API as users type it.

    Raises:
        DistError: A type checker finds something.
    """
    # Packages that users of the API have, too.
    there.install(
        "opentelemetry-sdk", "redis", "starlette", "--group", f"{ROOT / 'pyproject.toml'}:lint"
    )
    shutil.copytree(
        ROOT / "tests" / "typing",
        there.directory / "api",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    there.run("mypy", "--config-file=", "--strict", "--warn-unreachable", "api")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    (there.directory / "pyrightconfig.json").write_text(dumps({**settings, "include": ["api"]}))
    python = there.run("python", "-c", "import sys; print(sys.executable)")
    there.run("pyright", "--pythonpath", *python)


def try_cloned(directory: Path) -> None:
    """Do with a clone of this checkout what the README does with one: the demo, and the stack.

    The stack needs Docker, and is only tried with `CI=true`: its images are fetched and built.

    Raises:
        DistError: It does not run.
    """
    origin, home = directory / "origin", directory / "home"
    copy_repository(origin)
    # A user's `python3` is recent enough; the address means this checkout.
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "python3").symlink_to(Path(sys.executable).resolve())
    own = str(Path(sys.executable).parent)
    path = [each for each in os.environ["PATH"].split(os.pathsep) if each != own]
    settings = {
        "PATH": os.pathsep.join([str(home / "bin"), *path]),
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{origin.as_uri()}.insteadOf",
        "GIT_CONFIG_VALUE_0": REPOSITORY,
        "COMPOSE_PROJECT_NAME": f"readme-{os.getpid()}",
        **free_ports((ROOT / "docker" / ".env.example").read_text()),
    }
    blocks = shell_blocks((ROOT / "README.md").read_text())
    lines = [line for block in blocks[cloning(blocks) :] for line in block]
    if has_docker():
        try:
            shell(lines, home, settings)
        finally:
            run("make", "down", "ARGS=--volumes", cwd=home / REPOSITORY_NAME, settings=settings)
        print("the README's lines for those who clone the repository run")
    else:
        shell([line for line in lines if line != "make up"], home, settings)
        print("the README's lines for those who clone the repository run, without the stack")


def cloning(blocks: Sequence[Sequence[str]]) -> int:
    """Which block begins with the clone."""
    return next(at for at, lines in enumerate(blocks) if lines[0].startswith("git clone "))


def copy_repository(target: Path) -> None:
    """Make a repository of the files of this checkout, and of nothing that was made in it.

    Raises:
        DistError: git does not.
    """
    for name in repository_files():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target / name)
    user = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    run("git", "init", "--quiet", cwd=target)
    run("git", "add", "--all", "--force", cwd=target)
    run("git", *user, "commit", "--quiet", "--message", "All", cwd=target)


def has_docker() -> bool:
    """Whether the stack is started."""
    if os.environ.get("CI") != "true" or shutil.which("docker") is None:
        return False
    asked = (("docker", "compose", "version"), ("docker", "info"))
    return not any(
        subprocess.run(each, capture_output=True, check=False).returncode for each in asked
    )


def free_ports(settings: str) -> dict[str, str]:
    """A free port for each setting that is one."""
    names = re.findall(r"^(\w+_PORT)=", settings, re.MULTILINE)
    with ExitStack() as taken:
        servers = [taken.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in names]
        return {
            name: str(server.getsockname()[1]) for name, server in zip(names, servers, strict=True)
        }


def main() -> int:
    """Check what was built, and use it."""
    try:
        wheel = check_dist(ROOT / "dist")
        with TemporaryDirectory() as temporary:
            directory = Path(temporary).resolve()
            try_installed(directory / "installed", wheel)
            try_cloned(directory)
    except DistError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
