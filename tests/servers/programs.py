"""Programs that tests need and that the project does not install."""

import os
import shutil

import pytest


def required_program(name: str, package: str) -> str:
    """The path of a program; without it the test is skipped, and fails under `CI=true`."""
    path = shutil.which(name)
    if path is not None:
        return path
    reason = f"{name} not found: apt-get install {package}"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
