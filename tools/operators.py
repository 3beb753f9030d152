"""Mutants that operators make: small changes of Python, anywhere in a file.

The operators are those of mutmut. Its own runner takes no lines of a diff and no sample, chooses
tests by function, and leaves decorated functions, the bodies of classes and constants alone.
"""

import ast
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import libcst
from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

from tools.copies import ROOT

_UNTOUCHED = (libcst.Annotation, libcst.Decorator, libcst.Import, libcst.ImportFrom, libcst.Match)
_CODE = libcst.Module([]).code_for_node
T = TypeVar("T")


@dataclass(frozen=True)
class Mutant:
    """A change that tests should find, named by what it changes and not by its lines."""

    file: str
    function: str
    old: str
    new: str
    number: int
    """The same change may be possible at several places of a function."""


@dataclass(frozen=True)
class Place:
    """The bytes that a mutant replaces, and the lines of the statement that they belong to."""

    start: int
    end: int
    code: bytes
    lines: range

    def planted(self, source: bytes) -> bytes:
        """Return the source with the mutant."""
        return source[: self.start] + self.code + source[self.end :]


class _Operators(libcst.CSTVisitor):
    """Applies every operator to every node."""

    METADATA_DEPENDENCIES = (ByteSpanPositionProvider, PositionProvider)

    def __init__(self, file: str, source: bytes) -> None:
        super().__init__()
        self.file, self.source = file, source
        self.lines = source.decode().splitlines(keepends=True)
        self.statements = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.stmt)]
        self.scope: list[str] = []
        self.numbers: Counter[tuple[str, ...]] = Counter()
        self.made: dict[Mutant, Place] = {}

    def on_visit(self, node: libcst.CSTNode) -> bool:
        """Add the mutants of a node."""
        if isinstance(node, _UNTOUCHED) or (
            isinstance(node, libcst.If) and _CODE(node.test) == "TYPE_CHECKING"
        ):
            return False
        if isinstance(node, libcst.FunctionDef | libcst.ClassDef):
            self.scope.append(node.name.value)
        for kind, operator in mutation_operators:
            for changed in operator(node) if isinstance(node, kind) else ():
                self._add(node, _CODE(changed))
        # mutmut negates no condition, and deletes no statement.
        if isinstance(node, libcst.If | libcst.While | libcst.CompIf):
            self._add(node.test, f"not ({_CODE(node.test)})")
        elif isinstance(node, libcst.Return) and node.value is not None:
            self._add(node, "return None")
        elif isinstance(node, libcst.Raise) or (
            isinstance(node, libcst.Expr) and isinstance(node.value, libcst.Call | libcst.Await)
        ):
            self._add(node, "pass")
        return True

    def on_leave(self, original_node: libcst.CSTNode) -> None:
        """Leave a function or class."""
        if isinstance(original_node, libcst.FunctionDef | libcst.ClassDef):
            self.scope.pop()

    def _add(self, node: libcst.CSTNode, code: str) -> None:
        span = self.get_metadata(ByteSpanPositionProvider, node)
        lines = self.get_metadata(PositionProvider, node)
        first, last = lines.start.line, lines.end.line
        old = "".join(self.lines[first - 1 : last])
        head = self.lines[first - 1][: lines.start.column]
        new = head + code + self.lines[last - 1][lines.end.column :]
        change = (self.file, ".".join(self.scope), *_difference(old, new))
        if change[2] == change[3]:
            return
        self.numbers[change] += 1
        statement = max(
            n.lineno for n in self.statements if n.lineno <= first <= (n.end_lineno or 0)
        )
        self.made[Mutant(*change, self.numbers[change])] = Place(
            span.start, span.start + span.length, code.encode(), range(statement, first + 1)
        )


def _difference(old: str, new: str) -> tuple[str, str]:
    """Return the lines that differ."""
    before, after = ([line.strip() for line in text.splitlines()] for text in (old, new))
    while before and after and before[0] == after[0]:
        del before[0], after[0]
    while before and after and before[-1] == after[-1]:
        del before[-1], after[-1]
    return "\n".join(before), "\n".join(after)


def mutants_of(file: Path) -> Mapping[Mutant, Place]:
    """Return all mutants of a file, with their places."""
    source = (ROOT / file).read_bytes()
    visitor = _Operators(str(file), source)
    MetadataWrapper(libcst.parse_module(source)).visit(visitor)
    return visitor.made


def spread(items: Iterable[T], group: Callable[[T], Hashable], seed: str) -> list[T]:
    """Return items in an order that the seed chooses, first one of each group.

    Items that come and go do not change the order of the others.
    """
    ranked = sorted(items, key=lambda item: sha256(f"{seed}{item}".encode()).digest())
    numbers: Counter[Hashable] = Counter()
    order: dict[T, int] = {}
    for item in ranked:
        numbers[group(item)] += 1
        order[item] = numbers[group(item)]
    return sorted(ranked, key=order.__getitem__)
