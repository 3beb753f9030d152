"""The scripted provider with true rate limits, which it counts, and says as the real ones do.

Buckets that refill all the time, and the headers' names and formats: OpenAI
(https://platform.openai.com/docs/guides/rate-limits, durations such as `6m0s`) and Anthropic
(https://platform.claude.com/docs/en/api/rate-limits, RFC 3339, `retry-after` in whole seconds).
"""

import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.provider import Answer, Body, Provider

OUTPUT = 20
"""The tokens of each answer."""

TEXT = "This would exceed your rate limit."
ERRORS: dict[bool, Any] = {
    True: {"type": "error", "error": {"type": "rate_limit_error", "message": TEXT}},
    False: {"error": {"type": "requests", "code": "rate_limit_exceeded", "message": TEXT}},
}
"""The bodies of errors 429: Anthropic's and OpenAI's."""


class LimitedProvider(Provider):
    """It allows so many requests, and tokens, in a window, all of them together after a pause."""

    def __init__(self, url: str, requests: int, tokens: int, window: float) -> None:
        self.limits = {"requests": requests, "tokens": tokens}
        self.window = window
        self.left = {unit: float(limit) for unit, limit in self.limits.items()}
        self.accepted: list[tuple[float, int]] = []
        self.sent: list[tuple[float, int]] = []
        self.refusals: list[float] = []
        self._filled_at = time.monotonic()
        self._lock = threading.Lock()
        self._headers = threading.local()
        super().__init__(url)

    def answer(self, path: str, body: Body) -> tuple[int, list[str], Callable[[], object]]:
        """Count a request, and answer or refuse it."""
        messages = body.get("messages") or body["input"]
        given = sum(len(str(message["content"])) for message in messages) // 4
        cost, of_anthropic = {"requests": 1, "tokens": given + OUTPUT}, path.endswith("messages")
        with self._lock:
            now = time.monotonic()
            for unit, limit in self.limits.items():
                refilled = self.left[unit] + (now - self._filled_at) * limit / self.window
                self.left[unit] = min(float(limit), refilled)
            self._filled_at = now
            self.sent.append((now, cost["tokens"]))
            missing = {unit: amount - self.left[unit] for unit, amount in cost.items()}
            allowed = max(missing.values()) <= 0
            if allowed:
                self.left = {unit: left - cost[unit] for unit, left in self.left.items()}
                self.accepted.append((now, cost["tokens"]))
            self._headers.value = self._said(of_anthropic=of_anthropic)
            if not allowed:
                self.refusals.append(now)
                late = max(missing[unit] * self.window / self.limits[unit] for unit in cost)
                self._headers.value["retry-after"] = str(math.ceil(late))
                return 429, [json.dumps(ERRORS[of_anthropic])], bool
            kind = ("prompt", "completion") if path.endswith("completions") else ("input", "output")
            usage: dict[str, Any] = {f"{kind[0]}_tokens": given, f"{kind[1]}_tokens": OUTPUT}
            usage |= {} if of_anthropic else {"total_tokens": given + OUTPUT}
            self._answers = [Answer(usage=usage)]
            status, parts, then = super().answer(path, body)
            return status, [*parts], then

    def headers(self) -> Mapping[str, str]:
        """The headers of the answer that this thread has just made."""
        return dict(self._headers.value)

    def over(self) -> float:
        """The most that was sent beyond the rate and the burst in any span, as a share of it."""
        worst = -math.inf
        for unit, limit in self.limits.items():
            level, last = 0.0, -math.inf
            for at, tokens in self.sent:
                drained = (at - last) * limit / self.window
                level, last = max(0.0, level - drained) + (1 if unit == "requests" else tokens), at
                worst = max(worst, level / limit - 1)
        return worst

    def use(self, start: float, end: float) -> float:
        """The share of the tighter limit's rate that was used between two times."""
        counted = [tokens for at, tokens in self.accepted if start <= at < end]
        rates = {"requests": len(counted), "tokens": sum(counted)}
        spans = (end - start) / self.window
        return max(rates[unit] / (self.limits[unit] * spans) for unit in rates)

    def _said(self, *, of_anthropic: bool) -> dict[str, str]:
        said: dict[str, str] = {}
        for unit, limit in self.limits.items():
            left = max(0.0, self.left[unit])
            full_in = (limit - left) * self.window / limit
            if of_anthropic:
                at = datetime.now(UTC) + timedelta(seconds=full_in + self.ahead)
                reset = at.replace(microsecond=0).isoformat().replace("+00:00", "Z")
                name = "anthropic-ratelimit-{unit}-{part}"
            else:
                minutes, seconds = divmod(full_in, 60)
                reset = f"{minutes:.0f}m{seconds:.3f}s" if minutes else f"{full_in * 1000:.0f}ms"
                name = "x-ratelimit-{part}-{unit}"
            parts = {"limit": str(limit), "remaining": str(int(left)), "reset": reset}
            said |= {name.format(unit=unit, part=part): value for part, value in parts.items()}
        return said
