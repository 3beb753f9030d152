"""The quickstart as a reader walks it: the page's own lines, and the outputs that it shows."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.server.programs import required_program
from tests.server.prometheus import eventually
from tests.server.redis import free_port

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "quickstart.md"

BLOCK = re.compile(r"```(python|shell)\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
"""A block to run, and what the page says that it prints."""

ENVIRONMENT = os.environ | {
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
}
"""The tests' own, with the commands that are installed beside their Python."""

PROMETHEUS = "prometheus --config.file=prometheus.yml"


def test_the_quickstart_can_be_walked(tmp_path: Path) -> None:
    """Each step prints what the page says, up to the alert that fires."""
    for program in ("curl", "prometheus", "promtool"):
        required_program(program, "prometheus curl")
    metrics, answers = str(free_port()), str(free_port())
    page = PAGE.read_text().replace("9464", metrics).replace("9090", answers)
    page = page.replace("start_metrics_server()", f"start_metrics_server(port={metrics})")
    page = page.replace(PROMETHEUS, f"exec {PROMETHEUS} --web.listen-address=127.0.0.1:{answers}")
    before, serve, after = re.split(r"```shell\n(cat > prometheus.*?)```", page, flags=re.DOTALL)
    ((code, said),) = [found[1:] for found in BLOCK.findall(page) if found[0] == "python"]
    (tmp_path / "agent.py").write_text(code)
    log = tmp_path / "agent.log"
    with running(f"exec {sys.executable} -i agent.py", log):
        eventually(lambda: shows(log.read_text(), said))
        walked = walk(before, tmp_path)
        with running(serve, tmp_path / "prometheus.log"):
            walked += walk(after, tmp_path)
    assert any("/api/v1/alerts" in command for command in walked)


def walk(part: str, directory: Path) -> list[str]:
    """Run the shell blocks of a part of the page, each until it prints what the page says."""
    walked = []
    for kind, command, said in BLOCK.findall(part):
        if kind == "shell" and not command.startswith("pip install"):
            eventually(lambda: shows(output(command, directory), said))  # noqa: B023 - at once
            walked.append(command)
    return walked


def output(command: str, directory: Path) -> str:
    """What a command prints."""
    words = ["bash", "-c", command]
    options: Any = {"cwd": directory, "env": ENVIRONMENT, "timeout": 60}
    done: Any = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    return str(done.stdout + done.stderr)


def shows(printed: str, said: str) -> bool:
    """Whether all lines of a text were printed; a `…` in them stands for anything."""
    lines = [line.strip() for line in printed.splitlines()]
    patterns = [re.escape(line.strip()).replace("…", ".*") for line in said.splitlines()]
    return all(any(re.fullmatch(each, line) for line in lines) for each in patterns)


@contextmanager
def running(command: str, log: Path) -> Iterator[None]:
    """Run a command that stays, in the log's directory, as in a terminal of its own."""
    words, pipe = ["bash", "-c", command], subprocess.PIPE
    with (
        log.open("wb") as file,
        subprocess.Popen(
            words, cwd=log.parent, env=ENVIRONMENT, stdin=pipe, stdout=file, stderr=file
        ) as process,
    ):
        try:
            yield
        finally:
            process.terminate()
