"""Tools that limits name and an agent does not have: most likely misspelt."""

from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches

from langchain_quota.limits import Limit

_SHOWN = 5
"""The most tools that a hint lists."""

_SURELY_MEANT = 0.8
"""How alike an excluded name and a tool must be: agents often share their exclusions."""


def unknown_tools(
    limits: Sequence[Limit], offered: Collection[str]
) -> Iterator[tuple[str, str, str]]:
    """The names in limits that no tool has: the limit's name, the tool's, and what to do.

    Args:
        limits: The limits.
        offered: The tools that the agent has.
    """
    for limit in limits:
        for name in limit.tools:
            if name not in offered:
                yield limit.name, name, _hint(name, offered)
        for name in getattr(limit, "exclude", ()):
            if name not in offered:
                near = get_close_matches(name, offered, cutoff=_SURELY_MEANT)
                if near:
                    yield limit.name, name, _meant(near)


def _hint(name: str, offered: Collection[str]) -> str:
    near = get_close_matches(name, offered)
    if near:
        return _meant(near)
    if not offered:
        return "it offers none"
    more = ", …" if len(offered) > _SHOWN else ""
    return f"name one of {', '.join(map(repr, sorted(offered)[:_SHOWN]))}{more}"


def _meant(near: Sequence[str]) -> str:
    return f"did you mean {' or '.join(map(repr, near))}?"
