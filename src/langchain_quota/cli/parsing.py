"""A parser of arguments that names what it does not know before what is missing."""

import sys
from argparse import PARSER, ArgumentParser
from collections.abc import Iterable, Iterator
from typing import Any


class Parser(ArgumentParser):
    """An `ArgumentParser` that looks for unknown options first.

    `argparse` names them last. If an argument is missing, or if the unknown option's value is taken
    for a command, it does not name them at all: its message is about something else.
    """

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """Read the arguments of this command, and of those below it.

        Raises:
            SystemExit: An argument is wrong (code 2), or asks for help or the version (0).
        """
        given = sys.argv[1:] if args is None else list(args)
        unknown = [*self._unknown(given)]
        if unknown and not {"-h", "--help"}.intersection(given):
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return super().parse_known_args(given, namespace)

    def _unknown(self, given: list[str]) -> Iterator[str]:
        """The options among the arguments that this command does not have."""
        known = [text for action in self._actions for text in action.option_strings]
        has_commands = any(each.nargs == PARSER for each in self._actions)
        for argument in given:
            if argument == "--" or (has_commands and not argument.startswith("-")):
                return  # values follow, or a command, whose options are its own
            option = argument.partition("=")[0]
            # As in argparse, an option may be abbreviated, and a text with a space is a value.
            if (
                option.startswith("-")
                and " " not in argument
                and not self._negative_number_matcher.match(argument)
                and not any(each.startswith(option) for each in known)
            ):
                yield option
