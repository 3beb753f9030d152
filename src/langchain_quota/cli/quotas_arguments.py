"""The arguments of `langchain-quota quotas`, read without the package redis."""

import re
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError
from datetime import timedelta

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"([1-9][0-9]{0,6})([smhdw])")
NO_WINDOW = "none"
"""The value of `--window` for a count without a window."""


def add_arguments(quotas: ArgumentParser) -> None:
    """Add the actions and their arguments.

    Args:
        quotas: The command's parser.
    """
    actions = quotas.add_subparsers(dest="action", required=True)
    server = ArgumentParser(add_help=False)
    server.add_argument(
        "--redis",
        metavar="URL",
        help="the server, without a password (default: the URL in LANGCHAIN_QUOTA_REDIS_URL)",
    )
    server.add_argument("--prefix", help="the store's prefix, if it is not the default")
    several = ArgumentParser(add_help=False, parents=[server])
    several.add_argument(
        "--key",
        dest="keys",
        metavar="PATTERN",
        action="extend",
        nargs="+",
        default=[],
        help="only counts whose key matches, such as 'search:user_id:ada*' (default: all); "
        "counts of runs match only a pattern with ':run:' in it",
    )
    one = ArgumentParser(add_help=False, parents=[server])
    one.add_argument("--key", required=True, help="the count's key, such as 'email:user_id:ada'")
    actions.add_parser(
        "show", parents=[several], help="print what is used, of which limit, and until when"
    )
    reset = actions.add_parser("reset", parents=[several], help="set counts to 0")
    reset.add_argument("--yes", action="store_true", help="do not ask")
    _add_grant(actions.add_parser("grant", parents=[one], help="raise the limits over a count"))
    revoke = actions.add_parser("revoke", parents=[one], help="end a grant now")
    revoke.add_argument("--id", required=True, help="the grant's id, as quotas grants prints it")
    actions.add_parser("grants", parents=[several], help="print what is granted, and why")


def _add_grant(grant: ArgumentParser) -> None:
    grant.add_argument("amount", help="how much more: calls, tokens or dollars, as the key counts")
    grant.add_argument(
        "--for",
        dest="for_time",
        type=_duration,
        metavar="TIME",
        help="for how long at most, such as 30m, 12h, 1d or 2w (default: to the end of the "
        "window; without one, a year)",
    )
    grant.add_argument("--reason", required=True, help="why, for the list and the log")
    grant.add_argument("--by", metavar="NAME", help="who grants it (default: the system's user)")
    grant.add_argument(
        "--id", help="the grant's id: a second grant with the same key and id adds nothing"
    )
    grant.add_argument(
        "--window",
        type=_window,
        default=SUPPRESS,
        metavar="TIME",
        help=f"the quota's window, such as 1d, or {NO_WINDOW}: needed if no call has been counted "
        "in it yet",
    )


def _duration(text: str) -> timedelta:
    """A time such as `30m`, `12h`, `1d` or `2w`.

    Raises:
        ArgumentTypeError: The text is no such time.
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ArgumentTypeError(f"must be a time such as 30m, 12h, 1d or 2w, not {text!r}")
    return timedelta(seconds=int(match[1]) * _SECONDS[match[2]])


def _window(text: str) -> timedelta | None:
    """A window; `None` for a count without one."""
    return None if text == NO_WINDOW else _duration(text)
