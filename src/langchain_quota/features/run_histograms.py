"""Histograms of what runs have used when they end, for `Telemetry(run_histograms=True)`."""

from langchain_quota.core.checks import run_counter
from langchain_quota.limits.options import counts_calls
from langchain_quota.middleware.calls import model_context, model_counts
from langchain_quota.middleware.context import running_agent
from langchain_quota.middleware.feature import Feature
from langchain_quota.middleware.flow import Kernel
from langchain_quota.middleware.state import FeatureData, State, run_tools
from langchain_quota.telemetry.events import LimitSpend


class RunHistograms(Feature):
    """Observes what the limits have counted in a run, once, when it ends."""

    @classmethod
    def create(cls, kernel: Kernel) -> "RunHistograms | None":
        """Return the feature, or `None` without histograms, or where no run ends."""
        is_on = kernel.recorder.has_run_histograms and kernel.knows_run_end
        return cls(kernel) if is_on else None

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        # A RepeatLimit counts nothing that adds up, and a ConcurrencyLimit has no number for a run.
        self._limits = [limit for limit in kernel.limits if limit.counted and counts_calls(limit)]

    def begin_run(self, state: State, feature_data: FeatureData) -> None:  # noqa: ARG002 - as for every feature
        """Create the series at 0, because `increase()` does not see the first value of a series."""
        unused = [(limit.name, limit.unit, 0) for limit in self._limits]
        self.recorder.record_run(running_agent(), unused, has_ended=False)

    def end_run(self, state: State, runtime: object) -> None:
        """Observe the run, unless its last step runs again."""
        context = model_context(state, runtime)
        if not self.recorder.is_new(context.task(self._kernel.name)):
            return
        of_tools, counts = run_tools(state), model_counts(state)
        for count_more in self._kernel.state_counts_hooks:
            counts |= count_more(state)
        used: list[LimitSpend] = []
        for limit in self._limits:
            is_of_tools = limit.kind == "tool"
            count = of_tools.get(limit.counter, 0) if is_of_tools else counts[run_counter(limit)]
            used.append((limit.name, limit.unit, count))
        self.recorder.record_run(context.agent, used)
