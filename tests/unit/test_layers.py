"""The layers of the package: which module may import which, and what is public."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import langchain_quota
from tests.faults import at, no_faults
from tests.forked import run_python, without

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
PACKAGE = "langchain_quota"
FACADE = "the package itself"

LAYERS = [
    {
        *("_version", "arguments", "frozen", "levels", "locks", "model_errors", "model_usage"),
        *("money", "monitoring"),
    },
    {"decision"},
    {"admission", "errors", "quotas", "units"},
    {"limit_options", "user_line"},
    {"budgets", "estimates", "prices", "repeats"},
    {"limits"},
    {"model_runs", "resolved"},
    {"batches", "decide", "raised"},
    {"messages", "repeat_records"},
    {"state", "stores", "telemetry", "valid_history"},
    {"middleware", "testing"},
    {"exposition", "cli", "deep_agents", "graph", FACADE},
]
"""From the bottom up; a module imports from its own layer and those below."""
LAYER = {part: index for index, packages in enumerate(LAYERS) for part in packages}

MIDDLEWARE_LAYERS = [
    {"_form"},
    {
        "_context",
        "_history",
        "_interpreters",
        "_observers",
        "_semaphores",
    },
    {"_answers", "_corrections", "_sub_agents", "_tool_counts"},
    {"_abandoned", "_repeats", "_root_run", "_spending", "_turn"},
    {"_calls", "_settlements"},
    {"_let_through"},
    {"_late_use", "_model_calls", "_store", "_tool_calls", "_wiring"},
    {"_asking", "_charging", "_leases", "_other_runs"},
    {"_budgets", "_charged_response", "_model_request", "_offered_tools", "_root_subject"},
    {
        "_agent_budgets",
        "_at_once",
        "_current_limits",
        "_budgeted_call",
        "_unjudged",
        "_unlimited_models",
    },
    {"_base"},
    {"_reset"},
    {"_grantable"},
    {"drop_ins", "quota"},
    {"inline"},
]
"""The layers within middleware/; modules of one layer do not import each other."""
MIDDLEWARE_LAYER = {name: index for index, names in enumerate(MIDDLEWARE_LAYERS) for name in names}
MIDDLEWARE = sorted((SRC / PACKAGE / "middleware").glob("*[!_].py"))

PURE = {
    "admission",
    "budgets",
    "limit_options",
    "arguments",
    "batches",
    "decide",
    "decision",
    "levels",
    "limits",
    "messages",
    "money",
    "quotas",
    "raised",
    "repeats",
    "resolved",
}

MODULES = sorted((SRC / PACKAGE).rglob("*.py"))


def dotted(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part(module: str) -> str:
    """The part of the package that a module belongs to: the name behind the package's."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else FACADE


def is_module(name: str) -> bool:
    path = SRC.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


@cache
def tree(path: Path) -> list[ast.AST]:
    """All nodes of a file."""
    return [*ast.walk(ast.parse(path.read_text()))]


@cache
def imports(path: Path) -> dict[str, int]:
    """The modules that a file imports, wherever in it, each with the first line that does."""
    found: dict[str, int] = {}
    for node in tree(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.setdefault(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{at(path, node.lineno)}: import by the package's name"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                own = node.module.split(".")[0] == PACKAGE
                found.setdefault(inner if own and is_module(inner) else node.module, node.lineno)
    return found


def own_imports(path: Path) -> Iterator[tuple[str, int]]:
    """The packages that a file imports from, and where."""
    for each, line in imports(path).items():
        if each.split(".")[0] == PACKAGE:
            yield part(each), line


def test_there_are_modules() -> None:
    """What follows looks at something."""
    assert len(MODULES) > 10
    assert len(MIDDLEWARE) == len(MIDDLEWARE_LAYER)


def test_every_module_has_a_place() -> None:
    """Every module has a layer, those of middleware/ among themselves, too."""
    unplaced = [path for path in MODULES if part(dotted(path)) not in LAYER]
    unplaced_middleware = [path for path in MIDDLEWARE if path.stem not in MIDDLEWARE_LAYER]
    no_faults(
        (f"{at(path)}: {dotted(path)}" for path in (*unplaced, *unplaced_middleware)),
        remedy="Give the module a place in LAYERS or MIDDLEWARE_LAYERS.",
    )


def test_nothing_imports_upwards() -> None:
    """A module imports from its own layer and those below."""
    no_faults(
        (
            f"{at(path, line)}: {dotted(path)} imports {each}"
            for path in MODULES
            for each, line in own_imports(path)
            if LAYER.get(each, 0) > LAYER.get(part(dotted(path)), 0)
        ),
        remedy="Move what is shared down, to a layer that both may import.",
    )


def test_the_middlewares_share_what_is_below_them() -> None:
    """Each is built on what all share, and none on another; the pieces below stand alone."""
    prefix = f"{PACKAGE}.middleware."
    no_faults(
        (
            f"{at(path, line)}: {path.stem} imports {each}"
            for path in MIDDLEWARE
            if path.stem in MIDDLEWARE_LAYER
            for each, line in imports(path).items()
            if each.startswith(prefix)
            and MIDDLEWARE_LAYER.get(each.removeprefix(prefix), 0) >= MIDDLEWARE_LAYER[path.stem]
        ),
        remedy="Import only from the layers below; MIDDLEWARE_LAYERS has them.",
    )


def test_judging_and_telling_are_apart() -> None:
    """Telemetry does not know the rule that admits calls; what stands below cannot know it."""
    judging = {"admission", "resolved", "decide"}
    no_faults(
        (
            f"{at(path, line)}: {dotted(path)} imports {each}"
            for path in MODULES
            for each, line in own_imports(path)
            if part(dotted(path)) == "telemetry" and each in judging
        ),
        remedy="Let the middleware hand over what the other needs.",
    )


def test_no_module_imports_itself_through_others() -> None:
    """There is no circle of imports, nor one for types only."""
    known = {
        dotted(path): {each for each in imports(path) if each.split(".")[0] == PACKAGE}
        for path in MODULES
    }

    def reached(module: str) -> set[str]:
        found, left = set[str](), [*known[module]]
        while left:
            each = left.pop()
            if each not in found:
                found.add(each)
                left += known.get(each, ())
        return found

    circular = [each for each in MODULES if dotted(each) in reached(dotted(each))]
    no_faults(
        (f"{at(each)}: {dotted(each)}" for each in circular),
        remedy="Move what both need down, into a module of its own.",
    )


def test_the_pure_modules_know_no_library() -> None:
    """What decides is plain Python: no LangChain, no Prometheus, no OpenTelemetry."""
    paths = [SRC / PACKAGE / f"{name}.py" for name in sorted(PURE)]
    no_faults(
        (
            f"{at(path, line)}: {path.stem} imports {each}"
            for path in paths
            for each, line in imports(path).items()
            if each.split(".")[0] not in {PACKAGE, *sys.stdlib_module_names}
        ),
        remedy="Use the standard library only, or take the value as an argument.",
    )


def test_the_sdk_is_the_applications() -> None:
    """Outside of the command line the library imports OpenTelemetry's API only."""
    no_faults(
        (
            f"{at(path, line)}: {dotted(path)} imports {each}"
            for path in MODULES
            if part(dotted(path)) != "cli"
            for each, line in imports(path).items()
            if each.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))
        ),
        remedy="Use opentelemetry's API: the application brings the SDK.",
    )


def test_every_lock_outlives_a_fork() -> None:
    """Locks are made in one module; nothing else has one, hidden in a decorator or in the open."""
    locking = {"Lock", "RLock", "Condition", "allocate_lock", "cached_property"}
    found = [
        (path, node.lineno)
        for path in MODULES
        for node in tree(path)
        if (isinstance(node, ast.Attribute) and node.attr in locking)
        or (isinstance(node, ast.ImportFrom) and {each.name for each in node.names} & locking)
    ]
    (home,) = (SRC / PACKAGE).glob("locks.py")
    assert home in {path for path, _ in found}
    no_faults(
        (f"{at(path, line)}: {dotted(path)} makes a lock" for path, line in found if path != home),
        remedy="Take fork_safe_lock of langchain_quota.locks.",
    )


def test_redis_is_imported_by_its_store_only() -> None:
    """One module makes clients of Redis; all others do without, or through it."""
    found = [
        (path, line)
        for path in MODULES
        for each, line in imports(path).items()
        if each.split(".")[0] == "redis"
    ]
    (home,) = (SRC / PACKAGE / "stores").glob("redis_clients.py")
    assert home in {path for path, _ in found}
    no_faults(
        (f"{at(path, line)}: {dotted(path)} imports redis" for path, line in found if path != home),
        remedy="Go through stores/redis_clients.py: redis is an extra.",
    )


def test_the_public_names_are_sorted() -> None:
    """`__all__` is in order, without repetition."""
    assert langchain_quota.__all__ == sorted(set(langchain_quota.__all__))


def test_the_public_names_are_complete() -> None:
    """What types and editors read of the package, what it looks up and `__all__` are the same."""
    (facade,) = (path for path in MODULES if dotted(path) == PACKAGE)
    read = {
        alias.name
        for node in tree(facade)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE)
        for alias in node.names
    }
    assert read == {*langchain_quota.__all__} == {*vars(langchain_quota)["_HOME"], "__version__"}
    assert all(hasattr(langchain_quota, name) for name in langchain_quota.__all__)


def test_a_public_name_is_what_types_say() -> None:
    """What is looked up for a name is what the import for types has, and is looked up once."""
    (facade,) = (path for path in MODULES if dotted(path) == PACKAGE)
    for node in tree(facade):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            for alias in node.names:
                looked_up = getattr(langchain_quota, alias.name)
                assert looked_up is getattr(import_module(node.module or ""), alias.name)
                assert vars(langchain_quota)[alias.name] is looked_up


def test_the_package_comes_without_langchain() -> None:
    """To import the package, to list its names or to ask for another one imports no library."""
    program = (
        "import sys\n"
        "before = {*sys.modules}\n"
        f"import {PACKAGE}\n"
        f"print(*dir({PACKAGE}))\n"
        "try:\n"
        f"    {PACKAGE}.Quotas\n"
        "except AttributeError as error:\n"
        "    print(error)\n"
        "print(*{each.partition('.')[0] for each in {*sys.modules} - before})\n"
    )
    # The processes of `run_python` have imported LangChain.
    ended = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    listed, unknown, imported = ended.stdout.splitlines()
    assert {*langchain_quota.__all__} <= {*listed.split()}
    assert unknown == f"module '{PACKAGE}' has no attribute 'Quotas'"
    assert {*imported.split()} - sys.stdlib_module_names == {PACKAGE}


def test_a_wildcard_import_gives_the_public_names() -> None:
    """What `import *` brings is what is promised."""
    namespace: dict[str, object] = {}
    exec(f"from {PACKAGE} import *", namespace)  # noqa: S102 - the statement that users write
    assert set(langchain_quota.__all__) <= namespace.keys()


def test_importing_makes_no_metric() -> None:
    """Metrics are made at first use: an import leaves the global registry as it was."""
    done = run_python(
        f"from {PACKAGE} import *; import {PACKAGE}.testing\n"
        "from prometheus_client import REGISTRY\n"
        f"print([f.name for f in REGISTRY.collect() if f.name.startswith({PACKAGE!r})])"
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


EXTRAS = (
    *("opentelemetry.sdk", "redis", "rich", "langgraph.checkpoint.sqlite", "deepagents"),
    "genai_prices",
)


def test_importing_needs_no_extra() -> None:
    """The package can be imported without the SDK and without what the demo needs."""
    done = run_python(
        without(*EXTRAS) + f"from {PACKAGE} import *; import {PACKAGE}.testing, {PACKAGE}.cli\n"
    )
    assert done.returncode == 0, done.stderr


def test_redis_is_asked_for_when_it_is_needed() -> None:
    """Without redis its store can be imported; making one says what to install."""
    done = run_python(
        without("redis") + f"from {PACKAGE} import *\n"
        "try:\n"
        "    RedisStore('redis://127.0.0.1:1/0', prefix='mine')\n"
        "except ModuleNotFoundError as missing:\n"
        "    print(missing.name, missing)\n"
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
    named = (
        f"{at(path, number)}: {line.strip()}"
        for path in texts()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if OWN_MACHINE.search(line)
    )
    no_faults(named, remedy="Name the path relative to the project.")


def test_a_machines_path_would_be_found() -> None:
    """The search finds paths, and takes no web address for one."""
    for folder in ("home", "root", "work", "Users"):
        assert OWN_MACHINE.search(f'open("/{folder}/ada/x")')
    assert not OWN_MACHINE.search("https://example.org/home/page")
