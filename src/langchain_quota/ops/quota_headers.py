"""QuotaHeadersMiddleware: a web app tells its users what is left, and that a run was refused."""

import asyncio
import json
import string
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from math import ceil
from typing import Any
from urllib.parse import quote as percent_encoded

from langchain_quota.agents.subject_methods import Id, SubjectMethods
from langchain_quota.core.decision import Decision, LimitStatus
from langchain_quota.core.stops import RequestRuns, request_runs
from langchain_quota.errors import ModelCallLimitExceededError, ToolCallLimitExceededError
from langchain_quota.limits.call import ROOT_RUN, RUN, STORE
from langchain_quota.ops.page import Message, Receive, Send
from langchain_quota.runtime.arguments import (
    explain_arguments,
    validate_switch,
    validate_sync_function,
    validate_type,
)
from langchain_quota.runtime.expiring_dict import ExpiringDict
from langchain_quota.runtime.units import from_exact
from langchain_quota.telemetry.logs import logger

_Headers = list[tuple[bytes, bytes]]
_Limits = tuple[_Headers, list[object] | None]
"""Limits as headers and as JSON; `None` while the store is unavailable."""
_PRINTABLE = f" {string.punctuation}".replace("%", "")
_PROBLEM = "https://iana.org/assignments/http-problem-types#quota-exceeded"


@explain_arguments("app.add_middleware(QuotaHeadersMiddleware, quota=quota, subject=user_of)")
class QuotaHeadersMiddleware:
    """Adds RateLimit headers to the responses of an ASGI app, and answers 429 for refused runs.

    The headers are those of draft-ietf-httpapi-ratelimit-headers-11, at most a second old, and
    after a run with what it has used. They have an item for each enforced quota that counts by a
    name of the subject. A limit's exception becomes a problem (RFC 9457) if no headers were sent
    before, with `Retry-After` if waiting helps.

    Args:
        app: The ASGI app.
        quota: The `QuotaMiddleware` or `GraphQuota` whose limits are shown.
        subject: A function of the ASGI scope that returns whose limits they are, as `left` takes
            it: `{"user_id": "ada"}`, and the `prefix`; `None` for nobody. Take it from your
            authentication, never from a header or the query.
        path: Where `GET` and `HEAD` return these limits as JSON; 401 without a subject.
        replace_answers: Whether a successful response also becomes 429 if a limit of the subject
            ended an outermost run of the request before; not a limit of the run itself, because
            trying again does not help.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `quota` has no store or no quotas, or `path` has no slash.

    Examples:
        >>> from langchain_quota import ModelCallLimit, MemoryStore, Quota, QuotaMiddleware
        >>> from langchain_quota import QuotaHeadersMiddleware
        >>> daily = ModelCallLimit(quotas=[Quota(100, per="user_id", window="day")])
        >>> quota = QuotaMiddleware([daily], store=MemoryStore())
        >>> def user_of(scope):
        ...     return {"user_id": scope["user"].username} if "user" in scope else None
        >>> async def app(scope, receive, send): ...
        >>> app = QuotaHeadersMiddleware(app, quota=quota, subject=user_of)
    """

    def __init__(
        self,
        app: Callable[[Any, Any, Any], Awaitable[None]],
        *,
        quota: SubjectMethods,
        subject: Callable[[Message], Mapping[str, Id] | None],
        path: str = "/quota/me",
        replace_answers: bool = True,
    ) -> None:
        validate_type("quota", quota, SubjectMethods, "a QuotaMiddleware or a GraphQuota")
        validate_type("subject", subject, Callable, "a function of the ASGI scope")
        validate_sync_function("subject", subject, "scope")
        validate_type("path", path, str, "a path")
        validate_switch("replace_answers", replace_answers)
        if not path.startswith("/"):
            raise ValueError(f'path must begin with a slash, as "/quota/me" does, not {path!r}')
        if quota.kernel.store is None or not any(limit.quotas for limit in quota.kernel.limits):
            raise ValueError(
                "quota must have a store, and a limit that counts by user or customer, such as "
                'ModelCallLimit(quotas=[Quota(100, per="user_id", window="day")])'
            )
        self.app = app
        self._quota, self._subject, self._path = quota, subject, path
        self._replaces_answers = replace_answers
        self._clock = quota.kernel.store.clock
        self._is_second = False
        self._cache = ExpiringDict[asyncio.Task[_Limits]]()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if scope["method"] in {"GET", "HEAD"} and path == self._path:
            await self._send_limits(scope, send)
            return
        self._warn_of_second(scope)
        runs = RequestRuns()
        started = replaced = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started, replaced
            if message["type"] == "http.response.start" and not started:
                started = True
                succeeded = message["status"] in range(200, 300)
                own = [each for each in runs.refusals if self._is_own(scope, each)]
                if replaced := self._replaces_answers and succeeded and bool(own):
                    await self._send_problem(scope, send, own)
                # A client that obeys the headers would wait before it follows a redirection.
                elif message["status"] not in range(300, 400):
                    headers, _ = await self._limits(scope, is_fresh=runs.checked)
                    message = {**message, "headers": [*message.get("headers", ()), *headers]}
            if not replaced:
                await send(message)

        token = request_runs.set(runs)
        try:
            await self.app(scope, receive, send_with_headers)
        except (ModelCallLimitExceededError, ToolCallLimitExceededError) as error:
            raised = [] if error.decision is None else [error.decision]
            if started or not _refusing(raised):
                raise
            await self._send_problem(scope, send, raised)
        finally:
            request_runs.reset(token)

    def _warn_of_second(self, scope: Message) -> None:
        first = scope.setdefault(f"langchain_quota.{id(self._quota)}", self)
        if first is not self and not self._is_second:
            self._is_second = True
            logger.warning(
                "QuotaHeadersMiddleware is added twice for one quota, and sends its headers twice: "
                "add it once"
            )

    def _is_own(self, scope: Message, refusal: Decision) -> bool:
        """Return whether a limit refuses that would refuse another run of the subject, too."""
        subject = self._subject(scope) or {}
        for status in _refusing([refusal]):
            count = status.count_of(status.scope)
            if status.scope == RUN or (count is not None and count.per == ROOT_RUN):
                # It would not refuse another run.
                continue
            if count is None or str(subject.get(count.per, count.subject)) == count.subject:
                return True
        return False

    async def _send_limits(self, scope: Message, send: Send) -> None:
        if not self._subject(scope):
            # HTTP demands a challenge, and this one opens no dialog in a browser.
            challenge = (b"www-authenticate", b"Bearer")
            await _send_json(send, {"title": "Unauthorized", "status": 401}, [challenge])
            return
        headers, limits = await self._limits(scope)
        unavailable: dict[str, object] = {"title": "Service Unavailable", "status": 503}
        body: dict[str, object] = unavailable if limits is None else {"limits": limits}
        await _send_json(send, body, headers, has_body=scope["method"] != "HEAD")

    async def _send_problem(self, scope: Message, send: Send, refusals: list[Decision]) -> None:
        headers, _ = await self._limits(scope, is_fresh=True)
        ends = [refusal.resets_at for refusal in refusals]
        known_ends = [end for end in ends if end is not None]
        if len(known_ends) == len(ends):
            headers = [*headers, (b"retry-after", b"%d" % self._seconds_to(max(known_ends)))]
        policies = {_policy(status.limit, status.scope) for status in _refusing(refusals)}
        problem = {"type": _PROBLEM, "title": "Quota Exceeded", "status": 429}
        await _send_json(send, {**problem, "violated-policies": sorted(policies)}, headers)

    async def _limits(self, scope: Message, *, is_fresh: bool = False) -> _Limits:
        """Return the subject's limits as headers and as JSON; without a subject neither."""
        subject = self._subject(scope) or {}
        validate_type("what subject returns", subject, Mapping, "a mapping or None")
        name, now = repr(sorted(subject.items())), time.monotonic()
        # Who asks within a second has the same reading, but for a run that was charged since.
        reading = None if is_fresh else self._cache.get(name, now)
        if reading is None or reading.get_loop() is not asyncio.get_running_loop():
            reading = asyncio.ensure_future(self._read(subject))
            self._cache.put(name, reading, now + 1, now)
        return await asyncio.shield(reading)

    async def _read(self, subject: Mapping[str, Id]) -> _Limits:
        balances = await self._quota.balances(subject) if subject else None
        if balances is None:
            return [], None
        policies, remaining, limits = list[str](), list[str](), list[object]()
        for limit, scope, key, balance in balances:
            policy, end = _policy(limit.name, scope), balance.resets_at
            # JSON escapes ASCII text as structured fields do.
            name = json.dumps(policy)
            amounts = (from_exact(amount, limit.unit) for amount in (balance.limit, balance.left))
            # Structured fields have no larger integers than 15 digits.
            most, left = (min(10**15 - 1, amount) for amount in amounts)
            # The policy of a smooth quota is its rate, and its balance that of the burst.
            window = f";w={key.window}" if key.window else ""
            policies.append(f'{name};q={key.limit or most};qu="{limit.unit}"{window}')
            remaining.append(f"{name};r={left}" + (f";t={self._seconds_to(end)}" if end else ""))
            until = end and end.astimezone(UTC).isoformat()
            limits.append({"policy": policy, **asdict(balance), "resets_at": until})
        names = (b"ratelimit-policy", b"ratelimit") if limits else ()
        values = (", ".join(items).encode() for items in (policies, remaining))
        return [*zip(names, values, strict=False)], limits

    def _seconds_to(self, end: datetime) -> int:
        return max(0, ceil(end.timestamp() - self._clock()))


def _refusing(refusals: Iterable[Decision]) -> list[LimitStatus]:
    """Return the limits that refuse; a store that is unavailable is not the user's doing."""
    refused_by = (status for refusal in refusals for status in refusal.refused_by)
    return [status for status in refused_by if status.enforced and status.reason != STORE]


def _policy(limit: str, scope: str | None) -> str:
    """Return the name of a policy, in ASCII, as structured fields need it."""
    return percent_encoded(f"{limit}/{scope}", safe=_PRINTABLE)


async def _send_json(
    send: Send, body: dict[str, object], headers: _Headers, *, has_body: bool = True
) -> None:
    content = json.dumps(body, default=float).encode()
    kind = b"problem+json" if "status" in body else b"json"
    start = [(b"content-type", b"application/" + kind), (b"cache-control", b"no-store")]
    start += [(b"content-length", b"%d" % len(content)), *headers]
    status = body.get("status", 200)
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": content if has_body else b""})
