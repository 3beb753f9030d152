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
from langchain_quota import QuotaStore, admission, exposition, testing
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
OF_STORES = {
    f"admission.{name}": getattr(admission, name)
    for name in ("AcquireRequest", "AcquireResult", "Compensation", "Counter", "Hits", "Threshold")
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


def undocumented_arguments() -> Iterator[str]:
    for name, value in (CONSTRUCTORS | FUNCTIONS).items():
        found, wanted = [*section(value, "Args")], arguments(value)
        if not found and name in CONSTRUCTORS:
            # A record documents them as its fields, in any order.
            found, wanted = sorted(section(value, "Attributes")), sorted(wanted)
        if found != wanted:
            yield f"{at_code(value)}: {name} documents {found}, and takes {wanted}"
    for name, (cls, member) in METHODS.items():
        path, _, method = name.rpartition(".")
        docstring = inspect.getdoc(member)
        if not docstring:
            yield f"{at_code(member)}: {name} has no docstring"
        elif not isinstance(member, property) and not set_by_others(cls, method):
            form = re.match(r"`(\w+)`, without blocking", docstring)
            _, documenting = METHODS[f"{path}.{form[1]}"] if form else (cls, member)
            found, wanted = [*section(documenting, "Args")], arguments(member)
            if found != wanted:
                yield f"{at_code(member)}: {name} documents {found}, and takes {wanted}"


def test_arguments_are_documented() -> None:
    """Each public class, function and method documents its arguments, in their order.

    A record's are its fields. An async form may refer to the method that it is a form of; what
    LangChain or every store sets needs a docstring only.
    """
    no_faults(undocumented_arguments(), remedy="List the arguments in a section `Args:`.")


def undocumented_attributes() -> Iterator[str]:
    for name, value in CLASSES.items():
        others = [each for each in value.__mro__ if not is_ours(each)]
        inherited = {attribute for each in others for attribute in vars(each)}
        for cls in filter(is_ours, value.__mro__):
            documented = section(cls, "Args").keys() | section(cls, "Attributes").keys()
            for attribute in sorted({*attributes_without_text(cls)} - documented - inherited):
                yield f"{at_code(cls)}: {name}.{attribute}"


def test_attributes_are_documented() -> None:
    """Each public attribute of ours is documented: by the class, or by a text that follows it."""
    remedy = "Add it to `Attributes:`, or put a text behind it."
    no_faults(undocumented_attributes(), remedy=remedy)


def unknown_errors() -> Iterator[str]:
    for name, value in WITH_ERRORS.items():
        errors = section(value, "Raises")
        if not errors:
            yield f"{at_code(value)}: {name} has an empty section"
        for error in errors:
            found = EXPORTED.get(error, getattr(builtins, error, None))
            if not (isinstance(found, type) and issubclass(found, Exception)):
                yield f"{at_code(value)}: {name} raises {error!r}"


def test_errors_exist() -> None:
    """What a docstring says is raised is the name of one exception of Python's or of ours."""
    assert len(WITH_ERRORS) > 10
    remedy = "Under `Raises:` name one exception a line, which users can import."
    no_faults(unknown_errors(), remedy=remedy)


def test_what_is_public_is_found() -> None:
    """The loops above look at something."""
    assert len(CLASSES) > 10
    assert min(len(FUNCTIONS), len(METHODS), len(CONSTRUCTORS)) > 2
    assert {"QuotaMiddleware", "testing.ScriptedChatModel"} <= CONSTRUCTORS.keys() | CLASSES.keys()


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
