"""The docstrings of what is public: they are complete, they fit the code, and examples run."""

import doctest
import inspect
import re
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import pytest

import langchain_quota
from langchain_quota import exposition, testing
from langchain_quota.stores import redis_clients
from tests.faults import at_code, no_faults

EXPORTED = {name: getattr(langchain_quota, name) for name in langchain_quota.__all__}
FOR_TESTS = {f"testing.{name}": getattr(testing, name) for name in testing.__all__}
PUBLIC: dict[str, Any] = {
    name: value
    for name, value in (EXPORTED | FOR_TESTS).items()
    if isinstance(value, type | FunctionType)
}
"""The classes and functions for users: what else they import cannot have a docstring."""


def section(value: object, title: str) -> dict[str, str]:
    """The entries of a section of a docstring, by name."""
    _, _, text = (inspect.getdoc(value) or "").partition(f"\n{title}:\n")
    text, *_ = re.split(r"^\S", text, maxsplit=1, flags=re.MULTILINE)
    _, *parts = re.split(r"^ {4}(\S[^:\n]*):\s", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def faulty_examples() -> Iterator[str]:
    for name, value in PUBLIC.items():
        # A section of this name is shown as code on the site.
        prose, _, examples = (inspect.getdoc(value) or "").partition("\nExamples:\n")
        if ">>>" in prose:
            yield f"{at_code(value)}: {name} has an example before its section"
        test = doctest.DocTestParser().get_doctest(
            examples, {"__name__": "__main__"}, name, filename=None, lineno=None
        )
        if not test.examples:
            yield f"{at_code(value)}: {name} has no example"
        output: list[str] = []
        runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
        if runner.run(test, out=output.append).failed:
            yield f"{at_code(value)}: {name}\n{''.join(output)}"


def test_examples_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each public class and function has examples, which give what they say."""
    monkeypatch.delenv(exposition.ADDR_VARIABLE, raising=False)
    monkeypatch.delenv(redis_clients.URL_VARIABLE, raising=False)
    no_faults(faulty_examples(), remedy="Give it a section `Examples:` that runs as it stands.")
