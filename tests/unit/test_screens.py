"""The site's pages fit every screen: no line of code is cut, and a phone shows tables as lists."""

import re
from pathlib import Path

import pytest

from docs import phone
from tests.faults import no_faults

ROOT = Path(__file__).parents[2]

WIDEST = 90
"""Characters of a line of code that the site shows on a screen of 1280 pixels.

In docs/stylesheets/extra.css such letters have a size of which 93 fit beside a scrollbar. In a note
89 fit, and there the page indents them by 4.
"""

BLOCK = re.compile(r"^ *```(\w*)\n(.*?)\n *```$", re.DOTALL | re.MULTILINE)


def test_no_line_of_code_is_cut() -> None:
    """The site shows each line of code in full at 1280 pixels. It wraps output, called text."""
    faults = [
        f"{page.relative_to(ROOT)}: {line}"
        for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")))
        for language, code in BLOCK.findall(page.read_text())
        for line in code.splitlines()
        if language != "text" and len(line) > WIDEST
    ]
    no_faults(faults, remedy=f"Break lines of code after at most {WIDEST} characters.")


def table(*rows: str) -> str:
    """A table as the site has it, of a heading and rows; a bar stands between two cells."""
    head, *others = (row.split("|") for row in rows)
    lines = [[f"<th>{cell}</th>" for cell in head]]
    lines += [[f"<td>{cell}</td>" for cell in row] for row in others]
    return "<table>\n" + "\n".join("\n".join(["<tr>", *row, "</tr>"]) for row in lines) + "</table>"


def test_rows_become_lists_on_a_phone() -> None:
    """In a wide table of words, each cell has the heading of its column, for a list of cells."""
    made = phone.on_page_content(table('name|<code>"x"</code>|type', "a|b|c", "d||f"))
    assert re.findall(r'<td data-label="([^"]*)">(.?)</td>', made) == [
        ("name", "a"),
        ("&quot;x&quot;", "b"),
        ("type", "c"),
        ("name", "d"),
        ("&quot;x&quot;", ""),
        ("type", "f"),
    ]
    assert "data-label" in phone.on_page_content(
        table("name|meaning", f"<code>{'x' * 20}</code>|long")
    )


@pytest.mark.parametrize(
    "kept",
    [
        table("name|meaning", "<code>near</code>|short"),
        table("|ours|others", "price|low|high"),
        table("limits|memory|SQLite", "none|1.25|2,000", "one|3|4"),
    ],
    ids=["two columns", "columns to compare", "numbers"],
)
def test_other_tables_stay(kept: str) -> None:
    """A phone shows a table as a table if it fits, or if its columns are there to be compared."""
    assert phone.on_page_content(kept) == kept


def test_words_of_code_are_not_broken() -> None:
    """A word of code stays in one line. A phone breaks a word that is too long between parts."""
    assert phone.on_page_content("<code>search</code>, <code>--to x</code>") == (
        '<code>search</code>, <code><span class="word">--to</span> x</code>'
    )
    word = "langchain_quota_errors_total{component=&quot;store&quot;}"
    parts = "langchain_<wbr>quota_<wbr>errors_<wbr>total{<wbr>component=<wbr>&quot;store&quot;}"
    assert (
        phone.on_page_content(f"<code>{word}</code>")
        == f'<code><span class="long">{parts}</span></code>'
    )
    title = '<h1 id="x">{}<a class="headerlink" href="#x"></a></h1>'
    parts = '<span class="long">Lang<wbr>Chain<wbr>Quota<wbr>Limit<wbr>Breached</span>'
    assert phone.on_page_content(title.format("LangChainQuotaLimitBreached")) == title.format(parts)
    block = f"<pre><span></span><code>{word} --to</code></pre>"
    assert phone.on_page_content(block) == block


def test_pictures_lead_to_themselves() -> None:
    """A tap on a picture opens it in full: on a phone the words of a dashboard are too small."""
    picture = '<img alt="The overview" src="../images/overview.png#only-light" />'
    assert (
        phone.on_page_content(picture)
        == f'<a class="picture" href="../images/overview.png">{picture}</a>'
    )
