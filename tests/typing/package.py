"""The package as type checkers see it: it looks its names up late, and has no others."""
# ruff: noqa: F403, F405 - a star import is what is checked

from typing import assert_type

import langchain_quota
from langchain_quota import *
from langchain_quota import Quotas  # type: ignore[attr-defined]  # noqa: F401  # pyright: ignore[reportAttributeAccessIssue]

assert_type(langchain_quota.__version__, str)
assert_type(langchain_quota.ToolCallLimit("search", run_limit=3), ToolCallLimit)
assert_type(langchain_quota.MemoryStore(), MemoryStore)

langchain_quota.Quotas  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
