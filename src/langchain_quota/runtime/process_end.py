"""Functions that are called when a process ends, also one that multiprocessing has started."""

import atexit
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.util import Finalize, register_after_fork

_functions: dict[Callable[[], object], None] = {}
"""All functions, in the order of their registration."""


def call_at_end(function: Callable[[], object]) -> None:
    """Call a function when this process ends, and when a process ends that it forks."""
    atexit.register(function)
    _functions[function] = None
    if parent_process() is not None:
        _finalize(function)


def cancel_at_end(function: Callable[[], object]) -> None:
    """Do not call a function any more when the process ends."""
    atexit.unregister(function)
    _functions.pop(function, None)


def _finalize(function: Callable[[], object]) -> None:
    # A child that multiprocessing forks ends without the functions of atexit, and forgets its
    # parent's finalizers when it begins.
    Finalize(None, _call, (function,), exitpriority=0)


def _call(function: Callable[[], object]) -> None:
    if function in _functions:
        # A child that is spawned calls the functions of atexit, too, behind its finalizers.
        cancel_at_end(function)
        function()


def _after_fork(_: object) -> None:
    for function in _functions:
        _finalize(function)


# It is called as long as its first argument exists.
register_after_fork(call_at_end, _after_fork)
