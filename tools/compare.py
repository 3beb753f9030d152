"""`make compare`: play random agents with two editions of the package, and list what differs.

The package of the working tree and that of a commit play the same agents, which
`tools/random_agents.py` draws, in processes of their own. There, time only passes while everything
waits, and threads run one after the other, so that an edition plays an agent in one way only.
"""

import argparse
import asyncio
import faulthandler
import gc
import io
import json
import os
import random
import re
import subprocess
import sys
import tarfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from functools import partial
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = "37cbe44e"
"""The commit to compare with by default. Move it when a difference is meant, and merged."""
NOON = 1_767_268_800
"""2026-01-01T12:00:00Z, when each agent begins."""
MADE_UP = re.compile(r"[0-9a-f]{24,}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|0x[0-9a-f]+")
"""UUIDs, digests and addresses: two are the same if they come in the same places."""


class Frozen:
    """The seconds since noon, and how many futures have a number."""

    passed = 0.0
    numbers = 0


class Numbered:
    """A future whose place in a set depends on its number, and not on its address."""

    number = 0

    def __hash__(self) -> int:
        if not self.number:
            Frozen.numbers += 1
            self.number = Frozen.numbers
        return self.number


_numbered: list[Any] = [
    type("Future", (Numbered, of), {}) for of in (Future, asyncio.Future, asyncio.Task)
]
NumberedResult, NumberedFuture, NumberedTask = _numbered


def freeze() -> None:
    """Replace Python's clocks, pauses, threads and UUIDs, before other packages are imported."""
    python: list[tuple[Any, str, Callable[..., Any]]] = [
        (uuid, "uuid4", lambda: uuid.UUID(int=random.getrandbits(128), version=4)),
        (time, "sleep", _pass),
        (threading.Event, "wait", _wait),
        (threading.Thread, "start", threading.Thread.run),
        (ThreadPoolExecutor, "submit", _submit),
    ]
    for name, start in (("time", NOON), ("monotonic", 1000), ("perf_counter", 1000)):
        now = partial(lambda start: start + Frozen.passed, start)
        python += [(time, name, now), (time, f"{name}_ns", lambda now=now: int(now() * 10**9))]
    for owner, name, value in python:
        setattr(owner, name, value)


def _pass(seconds: float | None) -> None:
    if seconds is None:
        raise RuntimeError("it waits for ever")
    Frozen.passed += max(0, seconds)


def _wait(event: threading.Event, timeout: float | None = None) -> bool:
    _pass(0 if event.is_set() else timeout)
    return event.is_set()


def _submit(_: object, call: Any, /, *args: Any, **options: Any) -> Future[Any]:
    future: Future[Any] = NumberedResult()
    try:
        future.set_result(call(*args, **options))
    except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
        future.set_exception(error)
    return future


def frozen_loop() -> Any:
    """Return an event loop whose time passes when nothing else is left to do."""
    loop: Any = asyncio.SelectorEventLoop()
    select = loop._selector.select  # noqa: SLF001 - there is no other way

    def skip(timeout: float | None) -> Any:
        _pass(timeout)
        return select(0)

    def run_in_executor(_: object, call: Any, *args: Any) -> Any:
        return asyncio.wrap_future(_submit(None, call, *args), loop=loop)

    loop._clock_resolution, loop._selector.select = 1e-6, skip  # noqa: SLF001 - the same
    loop.create_future, loop.run_in_executor = partial(NumberedFuture, loop=loop), run_in_executor
    loop.set_task_factory(lambda loop, call, **options: NumberedTask(call, loop=loop, **options))
    return loop


def plain(value: Any) -> Any:
    """Return what JSON can say of a value."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, BaseException):
        decision = getattr(value, "decision", None)
        return plain({"error": type(value).__name__, "text": str(value), "decision": decision})
    if hasattr(value, "additional_kwargs"):  # a message
        value = {name: each for name, each in vars(value).items() if each}
    elif is_dataclass(value) and not isinstance(value, type):
        value = {each.name: getattr(value, each.name) for each in fields(value)}
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        # The state has a ledger of our own under this name, which nobody reads.
        return {str(key): plain(each) for key, each in value.items() if key != "langchain_quota"}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else str(value)


def masked(value: object) -> str:
    """Return plain data as a text that has nothing made up."""
    return MADE_UP.sub("", json.dumps(value, sort_keys=True))


def numbered(value: object) -> str:
    """Return plain data as a text that has numbers for what is made up."""
    found: dict[str, int] = {}
    text = json.dumps(value, sort_keys=True)
    return MADE_UP.sub(lambda each: f"#{found.setdefault(each[0], len(found))}", text)


def work(source: str, first: int, last: int, step: int) -> None:
    """Play agents in this process, and write a line of JSON for each."""
    freeze()
    agents: Any = import_module("tools.random_agents")
    if not Path(agents.langchain_quota.__file__).is_relative_to(source):
        sys.exit(f"{agents.langchain_quota.__file__} is imported, and not what is in {source}")
    gc.collect()
    gc.freeze()
    # Otherwise it would depend on the edition when abandoned calls end.
    gc.disable()
    for seed in range(first, last, step):
        faulthandler.dump_traceback_later(300, exit=True)
        seen = sorted(agents.play(seed).items())
        texts = [f'"{field}": {numbered(each)}' for field, each in seen]
        print("{", ", ".join(texts), "}", sep="", flush=True)


def played(source: Path, seeds: range, jobs: int) -> Iterator[str]:
    """Yield what an edition shows of each agent, which processes play in turn."""
    path = {"PYTHONPATH": f"{source}{os.pathsep}{ROOT}", "PYTHONHASHSEED": "0"}
    with ExitStack() as processes:
        outputs: list[Any] = []
        for first in seeds[:jobs]:
            code = (
                f"import tools.compare as c; c.work({str(source)!r}, {first}, {seeds.stop}, {jobs})"
            )
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                env={**os.environ, **path, "LANGSMITH_TRACING": "false"},
                stdout=subprocess.PIPE,
                text=True,
            )
            processes.enter_context(process)
            processes.callback(process.kill)
            outputs.append(process.stdout)
        for seed in seeds:
            line = outputs[(seed - seeds.start) % jobs].readline()
            yield line or sys.exit(f"agent {seed} was not played to its end by {source}")


def source_of(edition: str, folder: Path) -> Path:
    """Return the folder that has the package; that of a commit is written into `folder`."""
    if Path(edition, "langchain_quota").is_dir():
        return Path(edition).resolve()
    command = ["git", "archive", "--format=tar", edition, "src/langchain_quota"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"there is no edition {edition!r}: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder / "src"


def difference(one: Any, other: Any, at: str = "") -> tuple[str, Any, Any] | None:
    """Return where two values differ first, and both values there."""
    pairs: list[tuple[str, Any, Any]] = []
    if isinstance(one, dict) and isinstance(other, dict):
        pairs = [(f"{at}.{key}", one.get(key), other.get(key)) for key in {**one, **other}]
    elif isinstance(one, list) and isinstance(other, list):
        pairs = [(f"{at}[{n}]", *both) for n, both in enumerate(zip_longest(one, other))]
    elif one != other:
        return at, one, other
    found = (difference(mine, theirs, where) for where, mine, theirs in pairs)
    return next(filter(None, found), None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print what differs, and return 1 if anything does."""
    parser = argparse.ArgumentParser(prog="python -m tools.compare", description=__doc__)
    parser.add_argument("--against", metavar="COMMIT", default=REFERENCE, help="or a folder")
    parser.add_argument("--agents", type=int, default=300, help="how many: %(default)s")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first one")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--show", type=int, default=3, help="how many agents of each field")
    chosen = parser.parse_args(arguments)
    seeds = range(chosen.first, chosen.first + chosen.agents)
    fields_of: dict[str, dict[int, Any]] = {}
    unplayable = Counter[str]()
    with TemporaryDirectory(prefix="compare-") as folder:
        editions = ROOT / "src", source_of(chosen.against, Path(folder))
        both = (played(source, seeds, chosen.jobs) for source in editions)
        for seed, *lines in zip(seeds, *both, strict=True):
            here, there = ({}, {}) if lines[0] == lines[1] else map(json.loads, lines)
            if missing := here.get("unplayable") or there.get("unplayable"):
                unplayable[missing] += 1
                continue
            for field in {**here, **there}:
                if found := difference(here.get(field), there.get(field), field):
                    fields_of.setdefault(field, {})[seed] = found
    for field, differences in fields_of.items():
        print(f"{field} of {len(differences)} agents: {' '.join(map(str, differences))}")
        for seed, (where, *values) in [*differences.items()][: chosen.show]:
            now, then = (str(value)[:500] for value in values)
            print(f"  {seed}: {where}\n    now:  {now}\n    then: {then}")
    for missing, count in unplayable.items():
        print(f"{count} agents need what one edition does not have: {missing}")
    differing = {seed for differences in fields_of.values() for seed in differences}
    compared = len(seeds) - unplayable.total()
    print(f"{compared - len(differing)} of {compared} agents are played in the same way")
    return int(bool(differing) or not compared)


if __name__ == "__main__":
    sys.exit(main())
