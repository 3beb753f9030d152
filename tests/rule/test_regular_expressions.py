"""No text from outside stops the event loop: all regular expressions take linear time."""

import re
import signal
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import langchain_quota

ROOT = Path(langchain_quota.__file__).parent
USES = re.compile(r"\bre\.(?:compile|search|match|fullmatch|sub|split|findall|finditer)\(")
EXPRESSIONS = [
    # A file, an expression in it, how it is used, how the worst text begins, and what is repeated.
    ("cli/arguments.py", "_MATCHER", "match", ' a="', '\\"a'),
    ("cli/arguments.py", "_URL", "fullmatch", "https://", "a:/"),
    ("cli/export.py", "_PLACEHOLDER", "search", "", "langchain_quotaa/"),
    ("cli/quotas.py", "_PASSWORD", "search", "", "://:"),
    ("cli/quotas.py", "re.compile('[a-zA-Z]+://')", "match", "", "a"),
    ("core/provider_limits.py", "_DELAY", "search", "retryDelay", "."),
    ("core/provider_limits.py", "_LIMIT", "fullmatch", "x-ratelimit-limit-", "requests"),
    ("features/budgets/prices.py", "_BEDROCK", "match", "", "a-"),
    ("features/budgets/reports.py", "re.compile('gemini-[12]')", "search", "", "gemini-"),
    ("limits/quotas.py", "_SCOPE_NAME", "fullmatch", "", "a_"),
    ("runtime/units.py", "_DURATION", "fullmatch", "", "1"),
    ("stores/keys.py", "_CUT", "fullmatch", "", "a~"),
    ("stores/keys.py", "_PLAIN", "fullmatch", "", "a:"),
    ("stores/keys.py", "_PREFIX", "fullmatch", "", "a"),
    ("stores/keys.py", "_TEXT", "fullmatch", "a/", "%20"),
    ("stores/postgres.py", "re.compile(r'[*?\\[]')", "split", "", "a"),
    ("stores/postgres_connections.py", "re.compile('[0-9,]*')", "fullmatch", "", "1,"),
    ("stores/postgres_connections.py", "re.compile('[@=]')", "search", "", "a"),
    ("stores/redis_clients.py", "re.compile('[a-zA-Z]+://')", "match", "", "a"),
    ("stores/redis_clients.py", "re.compile('^([^/]*//).*@')", "search", "", "//"),
    ("stores/redis_clients.py", "re.compile('/?[0-9]*')", "fullmatch", "/", "1"),
    ("stores/redis_clients.py", "re.compile('maxmemory_policy:([a-z-]+)')", "search", "", "a-"),
    ("stores/redis_rows.py", "re.compile(r'[\\[\\\\]')", "split", "", "a"),
    ("stores/server.py", r"re.compile('(?<!\\w)secret(?!\\w)')", "search", "", "secre"),
    ("telemetry/labels.py", "TOOL", "fullmatch", "", "a"),
    *(
        ("ops/page.py", f"_PARAMETERS[{key!r}]", "fullmatch", "", "-")
        for key in ("find", "state", "sort", "rows")
    ),
    ("ops/page.py", "re.compile('<style>(.*?)</style>')", "findall", "<style>", "</"),
]


def test_every_text_takes_linear_time() -> None:
    """1 MB of the worst text is read at once by each expression, and none is left out."""

    def stop(*_: object) -> None:
        raise TimeoutError(name)

    sources = {str(path.relative_to(ROOT)): path.read_text() for path in ROOT.rglob("*.py")}
    used = Counter({file: len(USES.findall(source)) for file, source in sources.items()})
    assert used == Counter(file for file, *_ in EXPRESSIONS)
    before: Any = signal.signal(signal.SIGALRM, stop)
    try:
        for file, name, method, start, unit in EXPRESSIONS:
            module = import_module(f"langchain_quota.{file[:-3].replace('/', '.')}")
            expression = eval(name, {**vars(module), "re": re})  # noqa: S307 - of the table
            is_composed = file in ("stores/server.py", "ops/page.py")
            assert name[:3] != "re." or is_composed or expression.pattern in sources[file]
            signal.alarm(60)  # A quadratic one takes hours.
            for end in ("", "\0"):
                getattr(expression, method)(start + unit * (10**6 // len(unit)) + end)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
