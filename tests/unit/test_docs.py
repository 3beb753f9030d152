"""The reference says everything that is public; `make docs` checks the pages, links and anchors."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

import langchain_quota
from langchain_quota import cli, testing
from tests.faults import differences, no_faults

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"

_OPTION = re.compile(r"^\| `(--[a-z-]+)", re.MULTILINE)


def described() -> list[str]:
    """The names that the pages of the reference take from the code."""
    return [
        name.rpartition(".")[2]
        for page in sorted(REFERENCE.glob("*.md"))
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    ]


def commands(
    parser: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, set[str]]]:
    """The commands that do something, each with its options."""
    deeper = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    for action in deeper:
        for name, command in action.choices.items():
            yield from commands(command, (*path, name))
    if not deeper:
        options = {text for each in parser._actions for text in each.option_strings}
        yield " ".join(path), options - {"-h", "--help"}


def test_every_public_name_is_in_the_reference_once() -> None:
    """The reference has each name of `__all__` and of `testing` once, and no other."""
    public = [*langchain_quota.__all__, *testing.__all__]
    no_faults(
        differences(REFERENCE / "index.md", described(), public, kind="name"),
        remedy="Give each public name one line `::: langchain_quota.…` in docs/reference/.",
    )


def test_every_command_is_in_the_reference() -> None:
    """The page of the command line has a section for each command, with exactly its options."""
    page = REFERENCE / "command-line.md"
    _, *sections = re.split(r"^## ", page.read_text(), flags=re.MULTILINE)
    described = [
        f"{text.partition(chr(10))[0]} {option}"
        for text in sections
        for option in ("", *_OPTION.findall(text))
    ]
    real = [
        f"{command} {option}"
        for command, options in commands(cli._parser())
        for option in ("", *options)
    ]
    no_faults(
        differences(page, described, real, kind="command or option"),
        remedy="Give each command a section, and each of its options a row.",
    )


def test_a_strict_build_checks_pages_and_links() -> None:
    """Everything that mkdocs can find wrong with pages and links is a warning, so it fails."""
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["validation"]
    assert settings.keys() == {"nav", "links"}
    assert {level for kind in settings.values() for level in kind.values()} == {"warn"}
    assert "$(MKDOCS) build --strict\n" in (ROOT / "Makefile").read_text()


def test_the_changelog_is_included() -> None:
    """The changelog's page has no text of its own: there is one changelog."""
    assert (ROOT / "docs" / "changelog.md").read_text() == '--8<-- "CHANGELOG.md"\n'
