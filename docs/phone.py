"""Pages that fit a phone: a hook makes what extra.css needs and Markdown cannot say."""  # noqa: INP001 - mkdocs loads it by its path

import re
from html import escape, unescape
from itertools import cycle
from typing import Any

LONGEST = 30
"""Characters of code that fit on a line of every phone."""
LONG_NAME = 20
"""Characters of a word that fit in a heading, and beside another column."""

_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_HEAD = re.compile(r"<th\b[^>]*>(.*?)</th>", re.DOTALL)
_PICTURE = re.compile(r'<img [^>]*?src="([^"#]+)[^>]*>')
_CODE = re.compile(r"(?<!<span></span><code>)(?<=<code>)[^<]+(?=</code>)")
_HEADING = re.compile(r'(?<=">)[^<]+(?=<a class="headerlink")')
_WORD = re.compile(r"\S+")
_PARTS = re.compile(r"(?<=[_.,:=/(\[{])(?=[\w&])|(?<=[a-z])(?=[A-Z])")


def on_page_content(html: str, **_: Any) -> str:
    """The page's content, for a reader with any screen."""
    html = _TABLE.sub(lambda found: labelled(found[0]), html)
    html = _CODE.sub(lambda found: whole(found[0], LONGEST), html)
    html = _HEADING.sub(lambda found: whole(found[0], LONG_NAME), html)
    return _PICTURE.sub(r'<a class="picture" href="\1">\g<0></a>', html)


def labelled(table: str) -> str:
    """The table, with its headings in the cells if a phone shows each row as a list.

    A table of numbers stays a table, and so does one whose first column has no heading: its columns
    are compared. A table of two columns fits, if no name in it is long.
    """
    heads = [unescape(re.sub(r"<[^>]+>", "", head)) for head in _HEAD.findall(table)]
    cells = re.findall(r"<td>(.*)</td>", table)
    numbers = [cell for cell in cells if re.match(r"\d[\d.,]*", cell)]
    names = re.search(rf"<tr>\s*<td>(<a [^>]*>)?<code>[^<]{{{LONG_NAME},}}", table)
    if not heads[0] or 3 * len(numbers) > len(cells) or not (names or heads[2:]):
        return table
    labels = cycle(heads)
    return re.sub("<td", lambda _: f'<td data-label="{escape(next(labels))}"', table)


def whole(text: str, longest: int) -> str:
    """The text, in which a phone breaks only words that are too long, and only between parts."""

    def kept(found: re.Match[str]) -> str:
        word = found[0]
        if len(unescape(word)) > longest:
            return f'<span class="long">{_PARTS.sub("<wbr>", word)}</span>'
        return word if word.isidentifier() else f'<span class="word">{word}</span>'

    return _WORD.sub(kept, text)
