"""Every shell block of the README runs as it stands there, in an environment of its own.

What stands before `git clone` is run with the package from a wheel of this checkout, what follows
in a clone of it. Package indexes are asked as a user's pip would ask them.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.compose import ENV_EXAMPLE
from tests.servers.programs import required_program, under_ci

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://github.com/langchain-quota/langchain-quota"
TIMEOUT = 1200
LOCAL = "+checkout"
"""Tells this checkout's version from one of the same number that an index may have."""

ADDED = {
    # The default port may be taken here, and the traffic need not be long.
    "langchain-quota demo": " --port 0 --seconds 1",
    "make demo": ' ARGS="--port 0 --seconds 1"',
}
"""What is added to lines of the README, and why."""

EXPECTED = {
    "langchain-quota --version": r"^langchain-quota .*\+checkout$",
    "langchain-quota demo": r"^scrape http://127\.0\.0\.1:\d+/metrics",
    "make demo": r"^scrape http://127\.0\.0\.1:\d+/metrics",
    "make up": r"^  Dashboards    http://localhost:",
}
"""What a line prints."""

KEPT = {"PATH", "LANG", "LD_LIBRARY_PATH", "TMPDIR", "SSL_CERT_FILE"}
"""Of the environment, beside what is pip's."""


def commands() -> list[str]:
    """The lines of all shell blocks, without comments."""
    blocks = re.findall(r"```shell\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = (line.partition("  #")[0].strip() for block in blocks for line in block.splitlines())
    return [line for line in lines if line]


def installed_and_cloned() -> tuple[list[str], list[str]]:
    """The lines before the clone, and those from it on."""
    lines = commands()
    first = next(index for index, line in enumerate(lines) if line.startswith("git clone "))
    return lines[:first], lines[first:]


def environment(home: Path, *, first_on_path: Path | None = None, **more: str) -> dict[str, str]:
    """A new user's: no virtual environment, no settings."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in KEPT or name.lower() in {"http_proxy", "https_proxy", "no_proxy"}
    }
    # Where packages come from is the machine's matter; so is what was fetched before.
    config = Path.home() / ".config" / "pip" / "pip.conf"
    if config.is_file():
        kept["PIP_CONFIG_FILE"] = str(config)
    kept["XDG_CACHE_HOME"] = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    kept |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    own = str(Path(sys.executable).parent)
    path = [each for each in kept["PATH"].split(os.pathsep) if each != own]
    if first_on_path is not None:
        path.insert(0, str(first_on_path))
    return {**kept, "HOME": str(home), "PATH": os.pathsep.join(path), **more}


def run(*command: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=TIMEOUT
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def shell(lines: Sequence[str], cwd: Path, env: Mapping[str, str]) -> None:
    """Run lines in one shell, each of which has to succeed and to print what is expected."""
    script = "".join(
        f"echo '<<< {number}'\n{line}{ADDED.get(line, '')}\n" for number, line in enumerate(lines)
    )
    output = run("bash", "-eu", "-c", script, cwd=cwd, env=env)
    printed = re.split(r"^<<< \d+\n", output, flags=re.MULTILINE)[1:]
    for line, text in zip(lines, printed, strict=True):
        assert re.search(EXPECTED.get(line, ""), text, re.MULTILINE), f"{line} printed {text!r}"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of this checkout, and nothing that was made in it, as a repository."""
    git = required_program("git", "git")
    listed = run(git, "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    target = tmp_path_factory.mktemp("checkout")
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    version = target / "src" / "langchain_quota" / "_version.py"
    version.write_text(re.sub(r'(__version__ = ".+)"', rf'\1{LOCAL}"', version.read_text()))
    user = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    run(git, "init", "--quiet", cwd=target)
    run(git, "add", "--all", "--force", cwd=target)
    run(git, *user, "commit", "--quiet", "--message", "All", cwd=target)
    return target


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package; where no package index can be reached the test is skipped, not under CI."""
    target = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    asked = (*pip, "download", "--quiet", "--no-deps", "--dest", target, "hatchling")
    if subprocess.run(asked, capture_output=True, check=False).returncode and not under_ci():
        pytest.skip("no package index can be reached")
    run(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", target, checkout, cwd=target)
    (made,) = target.glob("langchain_quota-*.whl")
    return made


def test_what_is_added_is_needed() -> None:
    """Each line that is treated apart stands in the README."""
    assert {*ADDED, *EXPECTED} <= set(commands())


def test_installed(wheel: Path, checkout: Path, tmp_path: Path) -> None:
    """The package and its extras are installed, the demo runs, and what is exported is there."""
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    pinned = tmp_path / "pinned.txt"
    pinned.write_text(f"langchain-quota=={wheel.name.split('-')[1]}\n")
    env = environment(
        tmp_path,
        first_on_path=tmp_path / "venv" / "bin",
        PIP_FIND_LINKS=f"{os.environ.get('PIP_FIND_LINKS', '')} {wheel.parent}".strip(),
        PIP_CONSTRAINT=f"{checkout / 'constraints.txt'} {pinned}",
    )
    lines, _ = installed_and_cloned()
    shell(lines, tmp_path, env)
    made = {path.suffix for path in tmp_path.glob("*/*") if path.is_file()}
    assert {".json", ".yaml"} <= made
    assert (tmp_path / "alertmanager" / "alertmanager.yaml").is_file()


def test_cloned(wheel: Path, checkout: Path, tmp_path: Path) -> None:
    """A clone runs the demo, and with Docker the whole stack."""
    required_program("make", "make")
    # A user's `python3` is recent enough; the address means this checkout.
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(Path(sys.executable).resolve())
    env = environment(
        tmp_path,
        first_on_path=tmp_path / "bin",
        GIT_CONFIG_COUNT="1",
        GIT_CONFIG_KEY_0=f"url.{checkout.as_uri()}.insteadOf",
        GIT_CONFIG_VALUE_0=REPOSITORY,
        COMPOSE_PROJECT_NAME=f"readme-{os.getpid()}",
    )
    env |= free_ports()
    _, lines = installed_and_cloned()
    clone = tmp_path / "langchain-quota"
    if has_docker():
        try:
            shell(lines, tmp_path, env)
        finally:
            run("make", "down", "ARGS=--volumes", cwd=clone, env=env)
    else:
        shell([line for line in lines if line != "make up"], tmp_path, env)
        refused = subprocess.run(
            ("make", "up", "DOCKER=no-such-docker"),
            cwd=clone,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert re.fullmatch(r"Docker with Compose is needed: https://\S+\n", refused.stdout)


def has_docker() -> bool:
    """Whether the stack is started: images are fetched and built, so under CI only."""
    if not under_ci() or shutil.which("docker") is None:
        return False
    asked = (("docker", "compose", "version"), ("docker", "info"))
    return not any(
        subprocess.run(each, capture_output=True, check=False).returncode for each in asked
    )


def free_ports() -> dict[str, str]:
    """A free port for each that the stack publishes."""
    names = re.findall(r"^(\w+_PORT)=", ENV_EXAMPLE.read_text(), re.MULTILINE)
    assert names
    with ExitStack() as taken:
        servers = [taken.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in names]
        return {
            name: str(server.getsockname()[1]) for name, server in zip(names, servers, strict=True)
        }
