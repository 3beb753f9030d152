"""Tries a running service, with the standard library only: a question, a refusal, its metrics."""
# ruff: noqa: INP001, PLR2004, T201 - a program that says what it found, by HTTP's statuses

import json
import os
import re
import sys
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener
from uuid import uuid4

LONG = " ".join(["word"] * 100)
"""The scripted model searches for every word: more often than any limit allows."""

BLOCKED = re.compile(r'^langchain_quota_calls_total\{.*decision="blocked".*\} (\S+)$', re.MULTILINE)


def main(url: str, token: str) -> None:
    """Ask a question that is refused, and find the refusal in the metrics."""
    thread = f"{url}/threads/check-{uuid4()}/messages"
    status, answer = _get(thread, {"text": "books"})
    _expect(status == 200 and json.loads(answer)["refusals"] == [], "a question", answer)
    status, answer = _get(thread, {"text": LONG})
    _expect(status == 403 and json.loads(answer)["detail"]["limit"], "a refusal", answer)
    status, answer = _get(f"{url}/metrics")
    _expect(status == 401, "metrics are kept from whoever has no token", answer)
    status, answer = _get(f"{url}/metrics", token=token)
    _expect(status == 200, "metrics for whoever has it", answer)
    counts = [float(count) for count in BLOCKED.findall(answer)]
    _expect(sum(counts) > 0, "the refusal is in the metrics", answer)


def _get(url: str, body: dict[str, Any] | None = None, token: str = "") -> tuple[int, str]:
    headers = {"content-type": "application/json", "x-forwarded-user": "check"}
    if token:
        headers["authorization"] = f"Bearer {token}"
    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data, headers)  # noqa: S310 - the caller's own service
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=30) as response:
            return response.status, response.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def _expect(fulfilled: bool, what: str, answer: str) -> None:  # noqa: FBT001 - an assertion
    if not fulfilled:
        sys.exit(f"not as it should be: {what}. The answer: {answer[:2000]}")
    print(f"ok: {what}")


if __name__ == "__main__":
    main(os.environ.get("URL", "http://127.0.0.1:8000"), os.environ["METRICS_TOKEN"])
