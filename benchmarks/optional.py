"""What a benchmark can do without."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def required() -> Iterator[None]:
    """Raises what the tests' servers raise where a program or a package is missing.

    Raises:
        LookupError: It is missing.
    """
    try:
        yield
    except (ModuleNotFoundError, KeyError, pytest.skip.Exception, pytest.fail.Exception) as error:
        raise LookupError(str(error)) from error
