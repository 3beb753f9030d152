"""The docstrings of what is public: they are complete, they fit the code, and examples run."""

import ast
import builtins
import doctest
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest

import langchain_quota
from langchain_quota import QuotaStore, exposition, reservation, testing
from langchain_quota.stores import redis_clients

EXPORTED = {name: getattr(langchain_quota, name) for name in langchain_quota.__all__}
FOR_TESTS = {
    f"testing.{name}": value
    for name, value in vars(testing).items()
    if not name.startswith("_") and getattr(value, "__module__", None) == testing.__name__
}
PUBLIC: dict[str, Any] = {
    name: value
    for name, value in (EXPORTED | FOR_TESTS).items()
    if isinstance(value, type | FunctionType)
}
"""The classes and functions for users: what else they import cannot have a docstring."""
OF_STORES = {
    f"reservation.{name}": getattr(reservation, name)
    for name in ("Cap", "Grant", "Reservation", "Settlement", "Slot")
}
"""What a store of a user's own is asked, and answers."""

CLASSES: dict[str, type] = {
    name: value for name, value in (PUBLIC | OF_STORES).items() if isinstance(value, type)
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: value for name, value in PUBLIC.items() if isinstance(value, FunctionType)
}


def is_ours(value: object) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] == "langchain_quota"


def methods(cls: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class has from us."""
    found: dict[str, Any] = {}
    for each in filter(is_ours, reversed(cls.__mro__)):
        found |= {
            name: member
            for name, member in vars(each).items()
            if isinstance(member, property | FunctionType) and not name.startswith("_")
        }
    yield from found.items()


METHODS = {
    f"{name}.{method}": (cls, member)
    for name, cls in CLASSES.items()
    for method, member in methods(cls)
}
CONSTRUCTORS = {
    name: cls
    for name, cls in CLASSES.items()
    if is_ours(cls.__init__)  # type: ignore[misc]  # of this very class
}
WITH_ERRORS = {
    name: value
    for name, value in (PUBLIC | {name: member for name, (_, member) in METHODS.items()}).items()
    if "Raises:" in (inspect.getdoc(value) or "")
}


def section(value: object, title: str) -> dict[str, str]:
    """The entries of a section of a docstring, by name."""
    _, _, text = (inspect.getdoc(value) or "").partition(f"\n{title}:\n")
    text, *_ = re.split(r"^\S", text, maxsplit=1, flags=re.MULTILINE)
    _, *parts = re.split(r"^ {4}(\S[^:\n]*):\s", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def arguments(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def set_by_others(cls: type, method: str) -> bool:
    """Whether a method's arguments are LangChain's, or those that every store has."""
    if cls is not QuotaStore and issubclass(cls, QuotaStore) and hasattr(QuotaStore, method):
        return True
    return any(method in vars(each) for each in cls.__mro__ if not is_ours(each))


@pytest.mark.parametrize("name", PUBLIC)
def test_examples_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each public class and function has examples, which give what they say."""
    monkeypatch.delenv(exposition.ADDR_VARIABLE, raising=False)
    monkeypatch.delenv(redis_clients.URL_VARIABLE, raising=False)
    # A section of this name is shown as code on the site.
    prose, _, examples = (inspect.getdoc(PUBLIC[name]) or "").partition("\nExamples:\n")
    assert ">>>" not in prose
    test = doctest.DocTestParser().get_doctest(
        examples, {"__name__": "__main__"}, name, filename=None, lineno=None
    )
    assert test.examples
    output: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    assert not runner.run(test, out=output.append).failed, "".join(output)


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_arguments_of_classes_are_documented(name: str) -> None:
    """The docstring of a class documents each argument of its constructor; a record's as fields."""
    cls = CONSTRUCTORS[name]
    documented = section(cls, "Args")
    if documented:
        assert [*documented] == arguments(cls)
    else:
        assert {*section(cls, "Attributes")} == {*arguments(cls)}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_of_functions_are_documented(name: str) -> None:
    """The docstring of a function documents each of its arguments, in their order."""
    assert [*section(FUNCTIONS[name], "Args")] == arguments(FUNCTIONS[name])


@pytest.mark.parametrize("name", METHODS)
def test_methods_are_documented(name: str) -> None:
    """Each public method and property has a docstring, which documents arguments of our own."""
    cls, member = METHODS[name]
    path, _, method = name.rpartition(".")
    docstring = inspect.getdoc(member)
    assert docstring
    if isinstance(member, property) or set_by_others(cls, method):
        return
    form = re.match(r"`(\w+)`, without blocking", docstring)
    _, documenting = METHODS[f"{path}.{form[1]}"] if form else (cls, member)
    assert [*section(documenting, "Args")] == arguments(member)


@pytest.mark.parametrize("name", CLASSES)
def test_attributes_are_documented(name: str) -> None:
    """Each public attribute of ours is documented: by the class, or by a text that follows it."""
    others = [each for each in CLASSES[name].__mro__ if not is_ours(each)]
    inherited = {attribute for each in others for attribute in vars(each)}
    for cls in filter(is_ours, CLASSES[name].__mro__):
        documented = section(cls, "Args").keys() | section(cls, "Attributes").keys()
        assert {*attributes_without_text(cls)} <= documented | inherited


@pytest.mark.parametrize("name", WITH_ERRORS)
def test_errors_exist(name: str) -> None:
    """What a docstring says is raised is the name of one exception of Python's or of ours."""
    errors = section(WITH_ERRORS[name], "Raises")
    assert errors
    for error in errors:
        found = EXPORTED.get(error, getattr(builtins, error, None))
        assert isinstance(found, type)
        assert issubclass(found, Exception)


def attributes_without_text(cls: type) -> Iterator[str]:
    """The public attributes that a class declares or sets, but for those with a text behind."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    body = definition.body
    for statement, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            yield from (
                node.attr
                for node in ast.walk(statement)
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
                if not node.attr.startswith("_") and ast.unparse(node.value) == "self"
            )
        if isinstance(statement, ast.Assign | ast.AnnAssign) and not is_text(following):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = (target.id for target in targets if isinstance(target, ast.Name))
            yield from (name for name in names if not name.startswith("_"))


def is_text(statement: ast.stmt | None) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
