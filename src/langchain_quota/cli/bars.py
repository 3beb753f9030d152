"""How views in the terminal draw what is used: a bar, and a color for each level."""

from langchain_quota.levels import Level

STYLES = {Level.OK: "green", Level.NEAR: "yellow", Level.EXHAUSTED: "red"}
"""The terminal's own colors, so that they fit a dark and a light background."""


def bar(share: float, width: int, characters: str) -> str:
    """A bar; it is empty only at 0, and full only from a share of 1 on."""
    full, empty = characters[0], characters[1]
    filled = min(width, max(int(width * min(share, 1.0)), 1 if share > 0 else 0))
    return full * filled + empty * (width - filled)


def is_utf(encoding: str | None) -> bool:
    """Whether an encoding has every character."""
    return (encoding or "").lower().replace("-", "").startswith("utf")


def bar_characters(encoding: str | None) -> str:
    """The characters of a bar: the full one, and the empty one."""
    return "▇_" if is_utf(encoding) else "#_"
