"""The rooms of the house: which module may import which, and what the package shows."""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

import langchain_quota

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
PACKAGE = "langchain_quota"
FACADE = "the package itself"

FLOORS = [
    {"_version", "limits", "locks", "decision", "reservation", "messages", "errors", "monitoring"},
    {"engine", "state", "stores", "telemetry"},
    {"middleware", "testing"},
    {"exposition", "cli", FACADE},
]
"""From the ground up; imports stay on a floor or go down."""
FLOOR = {room: index for index, rooms in enumerate(FLOORS) for room in rooms}

LANDINGS = [
    {"origin", "history", "requests", "observers", "resetting", "typevars", "unknown_tools"},
    {"subjects", "rulings", "store_client"},
    {"case", "subclassing"},
    {"dynamic", "tool_case", "model_case"},
    {"limiter"},
    {"tool_call_limit", "model_call_limit", "quotas"},
    {"quota", "inline"},
]
"""The steps within the middleware's room; what stands on one step does not know each other."""
LANDING = {name: index for index, names in enumerate(LANDINGS) for name in names}
MIDDLEWARE = sorted((SRC / PACKAGE / "middleware").glob("[!_]*.py"))

LIBRARIES = {
    "langchain",
    "langchain_core",
    "langgraph",
    "opentelemetry",
    "prometheus_client",
    "redis",
}
PURE = {"limits", "decision", "reservation", "engine", "messages"}

MODULES = sorted((SRC / PACKAGE).rglob("*.py"))


def dotted(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    """The room of a module: the part behind the package's name."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else FACADE


def is_module(name: str) -> bool:
    path = SRC.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def imports(path: Path) -> Iterator[str]:
    """The modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports by relative path"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                own = node.module.split(".")[0] == PACKAGE
                yield inner if own and is_module(inner) else node.module


def own_imports(path: Path) -> set[str]:
    return {room(each) for each in imports(path) if each.split(".")[0] == PACKAGE}


def test_there_are_modules() -> None:
    """What follows looks at something."""
    assert len(MODULES) > 10
    assert len(MIDDLEWARE) == len(LANDING)


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_every_module_has_a_floor(path: Path) -> None:
    """A new room needs a place in the house."""
    assert room(dotted(path)) in FLOOR


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_nothing_imports_upwards(path: Path) -> None:
    """A module imports from its own floor and those below."""
    own = FLOOR[room(dotted(path))]
    assert {each for each in own_imports(path) if FLOOR[each] > own} == set()


@pytest.mark.parametrize("path", MIDDLEWARE, ids=dotted)
def test_the_middlewares_share_what_is_below_them(path: Path) -> None:
    """Each is built on what all share, and none on another; the pieces below stand alone."""
    prefix = f"{PACKAGE}.middleware."
    found = {each.removeprefix(prefix) for each in imports(path) if each.startswith(prefix)}
    assert {each for each in found if LANDING[each] >= LANDING[path.stem]} == set()


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_judging_and_telling_are_apart(path: Path) -> None:
    """The engine knows nothing of telemetry, and telemetry nothing of the engine."""
    here = room(dotted(path))
    if here == "engine":
        assert "telemetry" not in own_imports(path)
    if here == "telemetry":
        assert "engine" not in own_imports(path)


@pytest.mark.parametrize("name", sorted(PURE))
def test_the_pure_modules_know_no_library(name: str) -> None:
    """What decides is plain Python: no LangChain, no Prometheus, no OpenTelemetry."""
    found = {each.split(".")[0] for each in imports(SRC / PACKAGE / f"{name}.py")}
    assert found & LIBRARIES == set()
    assert found <= {PACKAGE, *sys.stdlib_module_names}


def test_the_sdk_is_the_applications() -> None:
    """Outside of the command line the library imports OpenTelemetry's API only."""
    found = {
        each
        for path in MODULES
        if room(dotted(path)) != "cli"
        for each in imports(path)
        if each.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))
    }
    assert found == set()


def test_every_lock_outlives_a_fork() -> None:
    """Locks are made in one module; nothing else has one, hidden in a decorator or in the open."""
    locking = {"Lock", "RLock", "Condition", "allocate_lock", "cached_property"}
    found = {
        dotted(path)
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr in locking)
        or (isinstance(node, ast.ImportFrom) and {each.name for each in node.names} & locking)
    }
    assert found == {f"{PACKAGE}.locks"}


def test_redis_is_imported_by_its_store_only() -> None:
    """One module makes clients of Redis; all others do without, or through it."""
    found = {
        dotted(path)
        for path in MODULES
        if any(each.split(".")[0] == "redis" for each in imports(path))
    }
    assert found == {f"{PACKAGE}.stores.redis_clients"}


def test_the_public_names_are_sorted() -> None:
    """`__all__` is in order, without repetition."""
    assert langchain_quota.__all__ == sorted(set(langchain_quota.__all__))


def test_the_public_names_are_complete() -> None:
    """All that the package imports for its users is in `__all__`, and all of that is there."""
    shown = {
        name
        for name, value in vars(langchain_quota).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert {*langchain_quota.__all__} == {*shown, "__version__"}
    assert all(hasattr(langchain_quota, name) for name in langchain_quota.__all__)


def test_the_public_names_are_explained() -> None:
    """Every public class and function has a docstring."""
    values = [getattr(langchain_quota, name) for name in langchain_quota.__all__]
    documented = [each for each in values if inspect.isclass(each) or inspect.isfunction(each)]
    assert len(documented) > 10
    assert [each for each in documented if not each.__doc__] == []


def test_a_wildcard_import_gives_the_public_names() -> None:
    """What `import *` brings is what is promised."""
    namespace: dict[str, object] = {}
    exec(f"from {PACKAGE} import *", namespace)  # noqa: S102 - the statement that users write
    assert set(langchain_quota.__all__) <= namespace.keys()


def test_importing_makes_no_metric() -> None:
    """Metrics are made at first use: an import leaves the global registry as it was."""
    code = (
        f"import {PACKAGE}, {PACKAGE}.testing; from prometheus_client import REGISTRY; "
        f"print([f.name for f in REGISTRY.collect() if f.name.startswith({PACKAGE!r})])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"


def test_importing_needs_no_extra() -> None:
    """The package can be imported without the SDK and without what the demo needs."""
    code = (
        "import sys\n"
        "for name in ('opentelemetry.sdk', 'redis', 'rich', 'langgraph.checkpoint.sqlite'):\n"
        "    sys.modules[name] = None\n"
        f"import {PACKAGE}, {PACKAGE}.testing, {PACKAGE}.cli\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_redis_is_asked_for_when_it_is_needed() -> None:
    """Without redis its store can be imported; making one says what to install."""
    code = (
        "import sys\n"
        "sys.modules['redis'] = None\n"
        f"from {PACKAGE} import *\n"
        "try:\n"
        "    RedisStore('redis://127.0.0.1:1/0', prefix='mine')\n"
        "except ModuleNotFoundError as missing:\n"
        "    print(missing.name, missing)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (
        'redis RedisStore needs the package redis: pip install "langchain-quota[redis]"'
    )


def test_the_version_is_that_of_the_distribution() -> None:
    """What the package says of its version is what was installed."""
    assert version("langchain-quota") == langchain_quota.__version__


OWN_MACHINE = re.compile(r"(?<![\w.~$}-])/(?:home|root|work|Users)/\w")


def texts() -> Iterator[Path]:
    yield ROOT / "README.md"
    for folder in ("src", "tests", "docs", "dashboards", "docker"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".png":
                yield path


def test_no_file_names_someones_machine() -> None:
    """No path of a home or of a checkout stands in a file."""
    named = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in texts()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if OWN_MACHINE.search(line)
    ]
    assert named == []


def test_a_machines_path_would_be_found() -> None:
    """The search finds paths, and takes no web address for one."""
    for folder in ("home", "root", "work", "Users"):
        assert OWN_MACHINE.search(f'open("/{folder}/ada/x")')
    assert not OWN_MACHINE.search("https://example.org/home/page")
