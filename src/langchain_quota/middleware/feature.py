"""The seam: the methods of features. The kernel calls only those that a feature overrides."""

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, Self, TypedDict

from langchain.agents.middleware.types import (
    AgentMiddleware,
    ModelRequest,
    ModelResponse,
    ToolCallRequest,
)
from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool
from langgraph.types import Command

from langchain_quota.core.plans import LimitSet, Places
from langchain_quota.limits import Limit
from langchain_quota.limits.budgets import Price, Prices, UnknownPrice
from langchain_quota.middleware.calls import Change, Step, Update
from langchain_quota.middleware.state import FeatureData, State
from langchain_quota.runtime.sync_async import Mode, P, T

if TYPE_CHECKING:
    from langchain_quota.middleware.flow import Kernel

Middleware = AgentMiddleware[Any, Any, Any]
Tool = BaseTool | dict[str, Any]
"""A tool, or a provider's own tool."""
Request = ModelRequest[Any]
Response = ModelResponse[Any]
ToolAnswer = ToolMessage | Command[Any]
Handler = Callable[[Request], Awaitable[Response]]
ModelCall = Callable[[Request], Awaitable[Response | None]]
"""Makes a model call, or returns `None` if the call is blocked."""
ToolHandler = Callable[[ToolCallRequest], Awaitable[ToolAnswer]]
StepCheck = Callable[[Mode, Step], Awaitable[Step]]
"""Checks a step, and returns the newest step of the same calls, with its result."""


class FeatureOptions(TypedDict, total=False):
    """The settings of features, which `QuotaMiddleware` takes as arguments."""

    tell_model: bool
    hide_exhausted: bool
    prices: Prices | Mapping[str, Price] | None
    unknown_price: UnknownPrice
    charge_all_models: bool


class Feature:
    """A part of a middleware that is there only if one of its limits or options needs it."""

    name: ClassVar[str] = ""
    """Name of the feature's data in the ledger."""

    unused: ClassVar[Mapping[str, object]] = {}
    """Data of a thread that has used nothing."""

    shapes_requests: ClassVar[bool] = False
    """Whether its `around_model` calls `Kernel.shape_request`, to know the final request."""

    @classmethod
    def create(cls, kernel: "Kernel") -> "Feature | None":
        """Return the feature of a middleware, or `None` if no limit or option needs it."""
        return cls(kernel)

    def __init__(self, kernel: "Kernel") -> None:
        self._kernel = kernel
        self.recorder = kernel.recorder
        self.store = kernel.store

    @classmethod
    def needed_hooks(cls, limits: Sequence[Limit]) -> Collection[str]:  # noqa: ARG003 - for some features
        """Return the hooks that the feature needs, beyond those of the limits' kinds."""
        return ()

    def __deepcopy__(self, _: dict[int, object]) -> Self:
        """Return itself, so that copies of a middleware share the feature."""
        return self

    def begin_run(self, state: State, feature_data: FeatureData) -> None:
        """Write what a new run begins with: `feature_data[self.name]`."""

    def end_run(self, state: State, runtime: object) -> None:
        """Use the final state of a run that has ended, and was not interrupted."""

    def state_counts(self, state: State) -> Mapping[str, int]:
        """Return counts that only this feature can know, by the name of the counter."""
        raise NotImplementedError

    def adjust_limits(self, state: State, limits: LimitSet, places: Places) -> LimitSet:
        """Return the limits as they are now, perhaps changed."""
        return limits

    async def prepare(self, mode: Mode, step: Step) -> Step:
        """Return a step before it is checked, perhaps with other plans or counts."""
        return step

    async def admit(self, mode: Mode, step: Step, admit: StepCheck) -> Step:
        """Check a step; return the newest step of the same calls, with its result."""
        return await admit(mode, step)

    def conclude(self, step: Step, change: Change) -> Change:
        """Return the change that follows from a step, perhaps completed."""
        return change

    def after_model(self, state: State, *, saved: bool) -> None:
        """Use the state after the model's step; raise what that step could not raise.

        `saved` is false in the model's own node, whose update the graph may still drop.
        """

    async def shape_request(self, mode: Mode, request: Request) -> Request:
        """Return the request that the model gets."""
        return request

    async def around_model(
        self, mode: Mode, request: Request, call: ModelCall, written: Update
    ) -> Response | None:
        """Make an allowed model call, and add its state update to `written`.

        Return `None` if the call is blocked now.
        """
        return await call(request)

    async def around_tool(
        self, mode: Mode, request: ToolCallRequest, call: ToolHandler
    ) -> ToolAnswer:
        """Make an allowed tool call, or answer it instead."""
        return await call(request)


def overriding(
    features: Iterable[Feature], method: Callable[Concatenate[Any, P], T]
) -> list[Callable[P, T]]:
    """Return the methods by which features override one of the seam."""
    name = method.__name__
    return [
        getattr(feature, name) for feature in features if getattr(type(feature), name) is not method
    ]
