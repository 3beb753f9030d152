"""The reference says everything that is public; `make docs` checks the pages, links and anchors."""

import argparse
import builtins
import re
from collections.abc import Iterator
from pathlib import Path
from symtable import SymbolTable, symtable

import pytest
import yaml

import langchain_quota
from langchain_quota import cli, testing
from tests.faults import differences, no_faults

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
REPOSITORY = "https://github.com/langchain-quota/langchain-quota"

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


# Blocks that are pasted.

_CONTINUES = re.compile(
    r"\b(this|it|examples?|blocks|others)\b[^.]*?\bcontinues? (the|this|one|it)\b", re.IGNORECASE
)


def missing(code: str) -> set[str]:
    """The names that a block takes from the blocks before it."""

    def tables(table: SymbolTable) -> Iterator[SymbolTable]:
        yield table
        for each in table.get_children():
            yield from tables(each)

    module = symtable(code, "block", "exec")
    known = {each.get_name() for each in module.get_symbols() if each.is_local()}
    read = {
        each.get_name()
        for table in tables(module)
        for each in table.get_symbols()
        if each.is_referenced() and each.is_global()
    }
    return read - known - {*dir(builtins), "__file__", "__name__"}


def test_a_page_says_that_its_examples_continue() -> None:
    """Where a Python block needs names of a block before it, the page says that it continues it."""
    faults = []
    for page in sorted((ROOT / "docs").glob("**/*.md")):
        prose, *blocks = re.split(r"^```python\n", page.read_text(), flags=re.MULTILINE)
        names: set[str] = set()
        for block in blocks:
            code, _, after = block.partition("\n```\n")
            names |= missing(code)
            prose += after
        if names and not _CONTINUES.search(prose.replace("\n", " ")):
            faults.append(f"{page.relative_to(ROOT)}:1: {', '.join(sorted(names))}")
    no_faults(faults, remedy="Say that the examples of the page continue one another.")


# What readers come for.

WISHES = {
    "five searches a conversation": (
        "quickstart.md#1-limit-searches-in-a-conversation",
        "thread_limit=",
    ),
    "model calls per customer and day, over four workers": ("how-to/tenants.md", "RedisStore("),
    "who is near the limit, in Grafana": ("dashboards.md", "langchain-quota export grafana"),
    "being paged": ("alerts.md#be-paged-when-a-limit-is-breached", "receiver: pager"),
    "a person approves more": ("how-to/ask-at-a-limit.md", 'exit_behavior="ask"'),
    "plain LangGraph": ("langgraph.md", "GraphQuota(limits).add_to("),
    "deepagents": ("deepagents.md", "with_limits(create_deep_agent"),
    "a dollar budget": ("budgets.md", "CostLimit("),
    "an agent in a loop": ("how-to/stop-loops.md", "RepeatLimit("),
    "what it costs": ("cost.md", "milliseconds"),
}
"""What a reader wants, where it is answered, and what stands in the first code there, or text."""


def followed(page: Path) -> set[str]:
    """The pages, and parts of pages, to which a page of the docs has links."""
    text = page.read_text().replace(f"{REPOSITORY}/blob/main/docs/", f"{ROOT}/docs/")
    targets = re.findall(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", text, re.MULTILINE)
    found = set()
    for target in (inline or named for inline, named in targets):
        path, _, part = target.partition("#")
        to = (page.parent / path).resolve() if path else page
        if to.suffix == ".md" and to.is_relative_to(ROOT / "docs"):
            name = to.relative_to(ROOT / "docs").as_posix()
            found |= {name, f"{name}#{part}"}
    return found


def slug(heading: str) -> str:
    """The part of a page's address that leads to a heading."""
    return re.sub(r"[^\w]+", "-", heading.lower()).strip("-")


@pytest.mark.parametrize("start", ["README.md", "docs/index.md"])
def test_a_wish_is_two_clicks_away(start: str) -> None:
    """From the README and from the home page of the docs, two links lead to each answer's page."""
    near = followed(ROOT / start)
    for name in [each for each in near if "#" not in each]:
        near |= followed(ROOT / "docs" / name)
    assert [wish for wish, (to, _) in WISHES.items() if to.partition("#")[0] not in near] == []


def test_the_home_page_leads_to_each_wish() -> None:
    """The table of the docs' home page has a link to each answer, and to the right part of it."""
    near = followed(ROOT / "docs" / "index.md")
    assert [wish for wish, (to, _) in WISHES.items() if to not in near] == []


def test_the_first_code_is_the_answer() -> None:
    """Where a wish is answered, the first code answers it: nobody has to read on for it."""
    wrong = []
    for wish, (to, answer) in WISHES.items():
        name, _, part = to.partition("#")
        text = (ROOT / "docs" / name).read_text()
        headings = [m for m in re.finditer(r"^#+ (.+)$", text, re.MULTILINE) if slug(m[1]) == part]
        text = text[headings[0].start() if part else 0 :]
        code = re.search(r"```\w+\n(.*?)```", text, re.DOTALL)
        if answer not in (code[1] if code else text):
            wrong.append(wish)
    assert wrong == []


# For coding assistants.

LLMS = ROOT / "docs" / "llms.txt"
SOURCE = "https://raw.githubusercontent.com/langchain-quota/langchain-quota/main/docs/"


def listed(pages: object, found: list[str]) -> list[str]:
    """The pages in a part of the site's navigation."""
    if isinstance(pages, str):
        found.append(pages)
    else:
        for each in pages.values() if isinstance(pages, dict) else pages:  # type: ignore[attr-defined]  # a list
            listed(each, found)
    return found


def test_llms_txt_lists_every_page() -> None:
    """docs/llms.txt, which the site has at its root, leads to each page of the site by its title.

    Of the runbooks and of the reference it has the page that leads to the others.
    """
    (heading, _, quote, *_) = LLMS.read_text().splitlines()
    assert (heading, quote[:2]) == ("# langchain-quota", "> ")
    links = re.findall(r"^- (\[.+\]\(\S+\)): \w", LLMS.read_text(), re.MULTILINE)
    pages = listed(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"], [])
    of_others = re.compile(
        r"(runbooks|reference)/(?!README|index|command-line)|index\.md|changelog"
    )
    titles = {page: (ROOT / "docs" / page).read_text().partition("\n")[0][2:] for page in pages}
    expected = [
        f"[{title}]({SOURCE}{page})" for page, title in titles.items() if not of_others.match(page)
    ]
    no_faults(
        differences(LLMS, links, expected, kind="page"),
        remedy="Give each page of the site one line in docs/llms.txt.",
    )
