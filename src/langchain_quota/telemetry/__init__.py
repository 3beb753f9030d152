"""The settings of telemetry, and the default of a process."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cache
from types import MappingProxyType

from opentelemetry.trace import TracerProvider
from prometheus_client import REGISTRY, CollectorRegistry

from langchain_quota.runtime.arguments import (
    UserLine,
    validate_choice,
    validate_count,
    validate_share,
    validate_switch,
    validate_sync_function,
    validate_type,
)
from langchain_quota.telemetry.events import capturing
from langchain_quota.telemetry.instruments import Settings, instruments_of
from langchain_quota.telemetry.labels import Label, hmac_label
from langchain_quota.telemetry.recorder import Recorder
from langchain_quota.telemetry.tracing import Spans, Tracing

__all__ = ["Telemetry", "capturing", "default_telemetry", "hmac_label", "recorder_of"]


class Telemetry:
    """Metrics in Prometheus, OpenTelemetry spans and log lines for every checked call.

    It never raises into the agent: a failure is counted in `langchain_quota_errors_total` and
    logged once. Only a cancellation or an interrupt passes through. Several `Telemetry` on one
    registry share its metrics. Where OpenTelemetry's semantic conventions have a name for a span's
    attribute (`gen_ai.*`, `error.type`), it is used.

    Args:
        registry: Where the metrics are registered.
        tracer_provider: Makes the spans; `None` for OpenTelemetry's global provider.
        near: The used share, above 0 and at most 1, from which a limit counts as near.
        spans: Which calls get a span: `"all"`, only those `"refused"` (blocked, skipped, would
            block), or none (`"off"`).
        thread_label: Makes the label of a thread from its id, for ids that must not be seen in
            metrics and spans; see `hmac_label`. By default the id itself.
        subject_label: Which users, tenants and other subjects of quotas have series of their own:
            by the quota's name, a function that makes the label from the subject, such as
            `{"tenant": str, "user_id": hmac_label(key)}`. It is called for each new subject, by
            the thread that writes or by a scrape, and for each refusal, and must be quick. By
            default none, so nobody's id is in metrics. Quotas with `per="agent"` or `per="global"`
            always have series.
        max_exported_threads: The most threads that have series of their own, from 0 (none); those
            blocked within 5 minutes come first, then the nearest to their limits, then the most
            recent. Series stay for 15 minutes, and at most 50 begin with a scrape.
        max_exported_subjects: The most subjects with labels that have series of their own, from 0
            (none), in the same order.
        thread_ttl: How long a thread without calls keeps its series, and how long a user or
            another subject of a quota without calls is counted; above 0.
        max_tools: The most tool names per agent that are labels, beside those that limits name,
            from 0; later ones are labelled `_other`, even if a model has invented earlier ones.
        max_agents: The most names of agents that are labels, from 0; further ones are labelled
            `_other`. Logs and spans have every agent's own name.
        count_unchecked_calls: Whether to count model and tool calls that no limit checks, in runs
            in which an agent with this `Telemetry` has limits. They are counted in
            `langchain_quota_unchecked_calls_total`, with one log line for each kind of call. Meant
            for staging: once a middleware has such a `Telemetry`, every run of the process takes a
            few percent longer, with or without limits.
        run_histograms: Whether to observe what each run has used of its limits when it ends, in
            `langchain_quota_run_used` and its variants for tokens, dollars and seconds. Each run
            of an agent with a `QuotaMiddleware` then has one graph node more, at its end.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of bounds, or conflicts with another `Telemetry` on the
            same registry: the message names the argument and the value. Or, in prometheus_client's
            multi-process mode, its directory cannot be written to.

    Examples:
        >>> from langchain_quota import ModelCallLimit, QuotaMiddleware, Telemetry, hmac_label
        >>> from prometheus_client import CollectorRegistry
        >>> telemetry = Telemetry(
        ...     registry=CollectorRegistry(),
        ...     near=0.9,
        ...     thread_label=hmac_label("a secret of 16 bytes or more"),
        ... )
        >>> quota = QuotaMiddleware([ModelCallLimit(run_limit=10)], telemetry=telemetry)
    """

    def __init__(  # noqa: PLR0913 - keyword-only settings with defaults
        self,
        *,
        registry: CollectorRegistry = REGISTRY,
        tracer_provider: TracerProvider | None = None,
        near: float = 0.8,
        spans: Spans = "all",
        thread_label: Label | None = None,
        subject_label: Mapping[str, Label] = MappingProxyType({}),
        max_exported_threads: int = 500,
        max_exported_subjects: int = 100,
        thread_ttl: timedelta = timedelta(hours=1),
        max_tools: int = 100,
        max_agents: int = 1_000,
        count_unchecked_calls: bool = False,
        run_histograms: bool = False,
    ) -> None:
        validate_type("registry", registry, CollectorRegistry, "a CollectorRegistry")
        validate_type("tracer_provider", tracer_provider, TracerProvider | None, "a TracerProvider")
        validate_share("near", near)
        validate_choice("spans", spans, ("all", "refused", "off"))
        validate_type("thread_label", thread_label, Callable | None, "a function or None")
        validate_sync_function("thread_label", thread_label, "thread_id")
        _check_labels(subject_label)
        validate_type("thread_ttl", thread_ttl, timedelta, "a timedelta")
        if thread_ttl <= timedelta(0):
            raise ValueError(f"thread_ttl must be positive, not {thread_ttl!r}")
        bounds = {
            "max_exported_threads": max_exported_threads,
            "max_exported_subjects": max_exported_subjects,
            "max_tools": max_tools,
            "max_agents": max_agents,
        }
        for argument, value in bounds.items():
            validate_count(argument, value, what="a whole number")
        validate_switch("count_unchecked_calls", count_unchecked_calls)
        validate_switch("run_histograms", run_histograms)
        settings = Settings(
            near=near,
            thread_label=thread_label,
            subject_label=dict(subject_label),
            thread_ttl=thread_ttl,
            **bounds,
        )
        instruments = instruments_of(registry, settings)
        tracing = Tracing(tracer_provider, spans, hashed_threads=thread_label is not None)
        self.recorder = Recorder(
            *(instruments, tracing),
            created_at=UserLine.of_caller(),
            count_unchecked_calls=count_unchecked_calls,
            run_histograms=run_histograms,
        )


def _check_labels(value: object) -> None:
    """Check that `subject_label` maps names of quotas to functions."""
    must = "subject_label must map names of quotas to functions, as in {'tenant': str}"
    if not isinstance(value, Mapping):
        raise TypeError(f"{must}, not {value!r}")
    for quota, make in value.items():
        if not isinstance(quota, str) or not callable(make):
            raise TypeError(f"{must}: {quota!r} is mapped to {make!r}")
        validate_sync_function(f"subject_label of {quota!r}", make, "subject")


@cache
def default_telemetry() -> Telemetry:
    """Return the default `Telemetry` of middlewares: global registry and tracer provider."""
    return Telemetry()


def recorder_of(telemetry: Telemetry | None) -> Recorder:
    """Return the recorder of a `Telemetry`, by default of the process's one, for a middleware."""
    telemetry = default_telemetry() if telemetry is None else telemetry
    validate_type("telemetry", telemetry, Telemetry, "a Telemetry or None")
    return telemetry.recorder
