"""What the server serves beside its own routes, of which `/metrics` is one."""

from quota_telemetry import registry  # type: ignore[import-not-found]  # the server finds it
from starlette.applications import Starlette

from langchain_quota import metrics_app

app = Starlette()
app.add_route("/quota/metrics", metrics_app(registry))
