"""The arguments of `langchain-quota quotas`, read without the package redis."""

import re
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError
from datetime import timedelta
from typing import Any

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"([1-9][0-9]{0,6})([smhdw])")
NO_WINDOW = "none"
"""The value of `--window` for a count without a window."""


def add_arguments(quotas: ArgumentParser) -> None:
    """Add the actions and their arguments."""
    actions = quotas.add_subparsers(dest="action", required=True)
    server = ArgumentParser(add_help=False)
    text = "the server, without a password (default: the URL in LANGCHAIN_QUOTA_REDIS_URL)"
    server.add_argument("--redis", metavar="URL", help=text)
    server.add_argument("--prefix", help="the store's prefix, if it is not the default")
    several = ArgumentParser(add_help=False, parents=[server])
    text = (
        "only counts whose key matches, such as 'search:user_id:ada*' (default: all); counts of "
        "runs match only a pattern with ':run:' in it"
    )
    of_keys: Any = {"dest": "keys", "metavar": "PATTERN", "nargs": "+", "default": []}
    several.add_argument("--key", action="extend", help=text, **of_keys)
    one = ArgumentParser(add_help=False, parents=[server])
    one.add_argument("--key", required=True, help="the count's key, such as 'email:user_id:ada'")
    text = "print what is used, of which limit, and until when"
    actions.add_parser("show", parents=[several], help=text)
    reset = actions.add_parser("reset", parents=[several], help="set counts to 0")
    reset.add_argument("--yes", action="store_true", help="do not ask")
    _add_grant(actions.add_parser("grant", parents=[one], help="raise the limits over a count"))
    revoke = actions.add_parser("revoke", parents=[one], help="end a grant now")
    revoke.add_argument("--id", required=True, help="the grant's id, as quotas grants prints it")
    actions.add_parser("grants", parents=[several], help="print what is granted, and why")


def _add_grant(grant: ArgumentParser) -> None:
    add = grant.add_argument
    add("amount", help="how much more: calls, tokens or dollars, as the key counts")
    text = (
        "for how long at most, such as 30m, 12h, 1d or 2w (default: to the end of the window; "
        "without one, a year)"
    )
    add("--for", dest="for_time", type=_duration, metavar="TIME", help=text)
    add("--reason", required=True, help="why, for the list and the log")
    add("--by", metavar="NAME", help="who grants it (default: the system's user)")
    add("--id", help="the grant's id: a second grant with the same key and id adds nothing")
    text = (
        f"the quota's window, such as 1d, or {NO_WINDOW}: needed if no call has been counted in "
        "it yet"
    )
    add("--window", type=_window, default=SUPPRESS, metavar="TIME", help=text)


def _duration(text: str) -> timedelta:
    """A time such as `30m`, `12h`, `1d` or `2w`."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ArgumentTypeError(f"must be a time such as 30m, 12h, 1d or 2w, not {text!r}")
    return timedelta(seconds=int(match[1]) * _SECONDS[match[2]])


def _window(text: str) -> timedelta | None:
    """A window; `None` for a count without one."""
    return None if text == NO_WINDOW else _duration(text)
