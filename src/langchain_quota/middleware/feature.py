"""The seam: what a feature may do around the one flow. Only what a feature overrides is called."""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypedDict

from langchain.agents.middleware.types import ModelRequest, ModelResponse, ToolCallRequest
from langchain_core.messages import ToolMessage
from langgraph.types import Command

from langchain_quota.core.admission import AcquireResult
from langchain_quota.core.checks import ResolvedLimits
from langchain_quota.limits import Limit
from langchain_quota.limits.budgets import Price, Prices, UnknownPrice
from langchain_quota.middleware.calls import Batch, HookResult, Update
from langchain_quota.middleware.context import CallContext
from langchain_quota.middleware.state import FeatureData
from langchain_quota.runtime.sync_async import Mode

if TYPE_CHECKING:
    from langchain_quota.middleware.flow import Kernel

ToolAnswer = ToolMessage | Command[Any]
Handler = Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
ModelCall = Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any] | None]]
"""Makes a model call, or returns `None` if the call is blocked."""
ToolHandler = Callable[[ToolCallRequest], Awaitable[ToolAnswer]]
BatchCheck = Callable[[Batch], Awaitable[tuple[Batch, AcquireResult]]]
"""Checks a batch; returns the newest batch of the same calls, and its result."""


class Options(TypedDict, total=False):
    """The settings of features, which `QuotaMiddleware` takes as arguments."""

    tell_model: bool
    hide_exhausted: bool
    prices: Prices | Mapping[str, Price] | None
    unknown_price: UnknownPrice
    charge_all_models: bool


class Feature:
    """A part of a middleware that is there only if one of its limits or options needs it."""

    name: ClassVar[str] = ""
    """The name under which the ledger has what it keeps, if it keeps anything."""

    unused: ClassVar[Mapping[str, Any]] = {}
    """What it keeps of a thread that has used nothing."""

    shapes_requests: ClassVar[bool] = False
    """Whether its `around_model` shapes the request, because it needs the final one."""

    @classmethod
    def create(cls, kernel: "Kernel") -> "Feature | None":
        """The feature for a middleware; `None` if nothing there needs it."""
        raise NotImplementedError

    def __init__(self, kernel: "Kernel") -> None:
        self._kernel = kernel
        self.recorder = kernel.recorder
        self.store = kernel.store

    @classmethod
    def needed_hooks(cls, limits: Sequence[Limit]) -> Collection[str]:  # noqa: ARG003 - for some features
        """The hooks that it needs, beyond those of the limits' kinds."""
        return ()

    def __deepcopy__(self, _: dict[int, object]) -> Self:
        """Itself: copies of a middleware share what it knows."""
        return self

    def learn_tools(self, agent: str | None, tools: Sequence[Any]) -> None:
        """Learn the tools that an agent offers its model."""

    def begin_run(self, state: Any, feature_data: FeatureData) -> None:
        """Add to what a new run writes for features."""

    async def root_run_subject(
        self, mode: Mode, state: Any, caller: CallContext, prefix: str
    ) -> str:
        """Whose calls a store counts together in a root run."""
        raise NotImplementedError

    async def name_attempt(self, mode: Mode, runtime: Any) -> Any:
        """Change the runtime in which calls are checked."""
        return runtime

    def adjust_limits(self, state: Any, limits: ResolvedLimits) -> ResolvedLimits:
        """Change the limits of this moment."""
        return limits

    async def before_model_check(
        self, mode: Mode, state: Any, runtime: Any, limits: ResolvedLimits
    ) -> None:
        """Learn what other calls have used, before a model call is judged."""

    def state_counts(self, state: Any) -> Mapping[str, int]:
        """What this feature alone can count, by the name of the counter."""
        raise NotImplementedError

    def adjust_checks(self, batch: Batch) -> None:
        """Change what calls ask for."""

    async def check_batch(
        self, mode: Mode, batch: Batch, acquire: BatchCheck
    ) -> tuple[Batch, AcquireResult]:
        """Check a batch; return the newest batch of the same calls, and its result."""
        return await acquire(batch)

    def on_store_result(self, batch: Batch, result: AcquireResult) -> None:
        """Learn what a store has answered."""

    def on_store_unavailable(self, batch: Batch) -> None:
        """Learn that a store has not answered; an exception keeps the call from being judged."""

    async def recheck_stopped(
        self, mode: Mode, batch: Batch, result: AcquireResult
    ) -> tuple[Batch, AcquireResult]:
        """Judge a stopped batch once more."""
        return batch, result

    def on_hook_result(self, batch: Batch, conclusion: HookResult) -> HookResult:
        """Change what follows."""
        return conclusion

    def after_model(self, state: Any, *, saved: bool) -> None:
        """Learn what the model's step has written; raise what it could not raise."""

    async def shape_request(self, mode: Mode, request: ModelRequest[Any]) -> ModelRequest[Any]:
        """Change what the model gets."""
        return request

    async def check_rerun(self, mode: Mode, request: ModelRequest[Any]) -> Update | None:
        """Check a model call that runs again; return what ends the run, if it is refused."""
        return None

    async def around_model(
        self, mode: Mode, request: ModelRequest[Any], call: ModelCall, written: Update
    ) -> ModelResponse[Any] | None:
        """Make an allowed model call, and add its state update to `written`.

        Return `None` if the call is blocked now.
        """
        return await call(request)

    async def around_tool(
        self, mode: Mode, request: ToolCallRequest, call: ToolHandler
    ) -> ToolAnswer:
        """Make a tool call that was let through, or answer it instead."""
        return await call(request)
