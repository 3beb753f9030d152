"""What the server serves beside its own routes, of which `/metrics` is one."""

from typing import Any

from quota_telemetry import quota_by_user, registry  # type: ignore[import-not-found]  # the server finds it
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse

from langchain_quota import QuotaHeadersMiddleware, metrics_app


def subject(scope: Any) -> dict[str, str] | None:
    """Who asks, as the server's authentication has found."""
    user = scope.get("user")
    return {"user": user.identity} if user is not None else None


def not_reached(_: object) -> PlainTextResponse:
    """Only give the server a route to put the middleware around."""
    return PlainTextResponse("", 500)


app = Starlette()
app.add_route("/quota/metrics", metrics_app(registry))
app.add_route("/quota/me", not_reached)
app.add_middleware(QuotaHeadersMiddleware, quota=quota_by_user, subject=subject)
