"""No text from outside stops the event loop: all regular expressions take linear time."""

import ast
import re
import signal
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import langchain_quota

ROOT = Path(langchain_quota.__file__).parent

WORST: dict[str, str] = {
    # By the expression, what is repeated until a text has 1 MB, behind the text before a "|".
    "cli/arguments.py _MATCHER": ' a="|\\"a',
    "cli/arguments.py _URL": "https://|a:/",
    "cli/export.py _PLACEHOLDER": "|langchain_quota_a/",
    "cli/quotas.py _PASSWORD": "|://:",
    "cli/quotas.py re.sub": "|[*",
    "core/provider_limits.py _DELAY": "retryDelay|.",
    "core/provider_limits.py _LIMIT": "x-ratelimit-limit-|requests",
    "features/budgets/prices.py _BEDROCK": "|a-",
    "features/budgets/usage.py re.search": "|gemini-",
    "limits/quotas.py _SCOPE_NAME": "|a_",
    "runtime/units.py _DURATION": "|1",
    "stores/keys.py _PLAIN": "|a:",
    "stores/keys.py _PREFIX": "|a",
    "stores/keys.py _TEXT": "a/|%20",
    "stores/postgres.py re.split": "|a",
    "stores/postgres_connections.py re.fullmatch": "|1,",
    "stores/postgres_connections.py re.search": "|a",
    "stores/redis_clients.py re.fullmatch": "/|1",
    "stores/redis_clients.py re.search": "|maxmemory_policy:",
    "stores/redis_clients.py re.sub": "|//",
    "stores/redis_script.py _RESULT": "acquired 0 0\n1\n1|  a a",
    "stores/redis_script.py re.split": "|a",
    "stores/server.py re.sub": "|secre",
    "telemetry/labels.py TOOL": "|a",
    "telemetry/page.py _PARAMETERS": "|-",
    "telemetry/page.py re.findall": "<style>|</",  # the package's own page
}
INSIDE: dict[str, Any] = {"before": r"(?<!\w)", "behind": r"(?!\w)", "secret": "secret"}
"""What the parts of an expression are that only its function knows."""


def expressions() -> Iterator[tuple[str, str, re.Pattern[Any]]]:
    """Every regular expression of the package: its name, how it is used, and itself."""
    for path in sorted(ROOT.rglob("*.py")):
        file, source = path.relative_to(ROOT), path.read_text()
        module = import_module(".".join(("langchain_quota", *file.with_suffix("").parts)))
        names = {**vars(module), **INSIDE, "tag": "style"}
        tree = ast.parse(source)
        assigned = {
            id(call): target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name)
            for call in ast.walk(node)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not ast.unparse(node.func).startswith("re."):
                continue
            function = ast.unparse(node.func)
            if function == "re.escape":
                continue
            name = assigned.get(id(node), "") if function == "re.compile" else function
            method = function.partition(".")[2]
            if method == "compile":
                used = re.search(rf"{name}\b(?:\[\w+\])?\.(\w+)\(", source)
                method = used[1] if used else "fullmatch"
            flags = [ast.unparse(arg) for arg in node.args[1:] if "re." in ast.unparse(arg)]
            pattern = eval(ast.unparse(node.args[0]), names)  # noqa: S307 - our own source
            compiled = re.compile(pattern, eval(flags[0], names) if flags else 0)  # noqa: S307
            yield f"{file} {name}", method, compiled


def test_every_text_takes_linear_time() -> None:
    """1 MB of the worst text is read at once by each expression: no expression is left out."""

    def stop(*_: object) -> None:
        raise TimeoutError

    found = [*expressions()]
    assert {name for name, *_ in found} == {*WORST}
    before = signal.signal(signal.SIGALRM, stop)
    slow = []
    try:
        for name, method, expression in found:
            start, _, unit = WORST[name].partition("|")
            for end in ("", "\0"):
                text: Any = start + unit * (10**6 // len(unit)) + end
                text = text if isinstance(expression.pattern, str) else text.encode()
                arguments = ("", text) if method == "sub" else (text,)
                signal.alarm(60)  # A quadratic one takes hours.
                try:
                    getattr(expression, method)(*arguments)
                except TimeoutError:
                    slow.append(name)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert slow == []
