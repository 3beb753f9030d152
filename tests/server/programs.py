"""Programs that tests need and that the project does not install."""

import os
import shutil
from typing import NoReturn

import pytest


def required_program(name: str, package: str) -> str:
    """The path of a program; without it the test is skipped, and fails under `CI=true`."""
    path = shutil.which(name)
    if path is None:
        missing(f"{name} not found: apt-get install {package}")
    return path


def missing(reason: str) -> NoReturn:
    """Skip the test, or, under `CI=true`, fail it."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
