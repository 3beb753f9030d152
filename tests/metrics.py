"""The metrics as the reference lists them; a test compares it with the code."""

import re

from tools.reference import metrics


def documented() -> dict[str, list[str]]:
    """The labels of each series: a histogram has three of them."""
    found: dict[str, list[str]] = {}
    for names, labels, kind in re.findall(
        r"(?m)^\| (`langchain_quota.*?) \| (.*?) \| (\w+) \|", metrics()
    ):
        for name in re.findall(r"\w+", names):
            parts = ("_bucket", "_count", "_sum") if kind == "histogram" else ("",)
            found |= {f"{name}{part}": re.findall(r"\w+", labels) for part in parts}
    return found
