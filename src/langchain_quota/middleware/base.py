"""The base of all middlewares: LangChain's hooks, which call the kernel."""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from langchain.agents.middleware.types import AgentMiddleware, ResponseT, StateT
from langgraph.runtime import Runtime
from langsmith.utils import tracing_is_enabled

from langchain_quota.limits import Limit
from langchain_quota.middleware.calls import Update
from langchain_quota.middleware.feature import Feature
from langchain_quota.middleware.flow import Kernel
from langchain_quota.middleware.run_start import begin_run
from langchain_quota.runtime import compat

if TYPE_CHECKING:
    from langgraph._internal._typing import StateLike
    from typing_extensions import TypeVar

    # `AgentMiddleware` is invariant in state and context, and a list of middlewares has one type of
    # each. So ours say `Any` for the state, and for a context that is not given.
    ContextT = TypeVar("ContextT", bound=StateLike | None, default=Any)
else:
    from langgraph.typing import ContextT


_JUMPS = "__can_jump_to__"
"""The attribute that LangChain's `hook_config` sets."""

_STAND_INS = ("awrap_model_call", "awrap_tool_call")
"""The hooks that have stand-ins while LangSmith is switched off."""


def is_own(cls: type) -> bool:
    """Return whether a class is one of this package."""
    return cls.__module__.startswith("langchain_quota.")


class LimitMiddleware(AgentMiddleware[StateT, ContextT, ResponseT]):
    """A middleware that limits agents.

    Args:
        limits: The limits, checked together.
        limit_name: The name that the user gave, if any.
        settings: The other arguments of `Kernel`.
    """

    feature_kinds: ClassVar[Sequence[type[Feature]]] = ()
    """Kinds of features, in the order in which they are called."""
    kernel_kind: ClassVar[type[Kernel]] = Kernel
    """Class of the kernel."""
    trace_policy = compat.small_traces()
    """What traces show of the hooks."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise a `TypeError` if LangChain would ignore that an override ends the run."""
        super().__init_subclass__(**options)
        for hook in ("before_model", "abefore_model", "after_model", "aafter_model"):
            defined = [base for base in cls.__mro__ if hook in vars(base)]
            ours = next(base for base in defined if is_own(base) or base is AgentMiddleware)
            overridden_jumps, jumps = (
                getattr(vars(base)[hook], _JUMPS, ()) for base in (defined[0], ours)
            )
            if "end" in jumps and "end" not in overridden_jumps:
                raise TypeError(
                    f"{cls.__name__}.{hook} could not end a run, and calls over the limit would "
                    'run: write @hook_config(can_jump_to=["end"]) above it, and from '
                    "langchain.agents.middleware import hook_config"
                )

    def __init__(
        self, limits: tuple[Limit, ...], *, limit_name: str | None = None, **settings: Any
    ) -> None:
        super().__init__()
        self.limits = limits
        self._limit_name = limit_name
        self.kernel = self.kernel_kind(self, limits, feature_kinds=self.feature_kinds, **settings)
        if tracing_is_enabled():
            compat.TRACED.set()
        else:
            vars(self).update({hook: compat.untraced(self, hook) for hook in _STAND_INS})

    def __setstate__(self, state: dict[str, object]) -> None:
        """Copy the state of the original, with new stand-ins."""
        stand_ins = {hook: compat.untraced(self, hook) for hook in _STAND_INS if hook in state}
        vars(self).update(state, **stand_ins)

    @cached_property
    def name(self) -> str:
        """Name in the graph: its class, the limited tools and the limit's name."""
        parts = [*self.limits[0].tools, *([self._limit_name] if self._limit_name else [])]
        if not parts:
            return type(self).__name__
        # LangGraph reserves these two in the names of nodes.
        inner = "/".join(parts).replace(":", "_").replace("|", "_")
        return f"{type(self).__name__}[{inner}]"

    def before_agent(self, state: StateT, runtime: Runtime[ContextT]) -> Update | None:
        """Begin a new run: set the run's counts to 0, and answer every call left without an answer.

        LangGraph does not call this when a run is resumed.

        Raises:
            RuntimeError: Another middleware of this agent counts its model calls, too.
        """
        return begin_run(self.kernel, "", state, runtime)

    async def abefore_agent(self, state: StateT, runtime: Runtime[ContextT]) -> Update | None:
        """Call `before_agent` without blocking the event loop."""
        return begin_run(self.kernel, "a", state, runtime)

    def checking_nodes(self) -> tuple[str, ...]:
        """Return the graph nodes in which calls are checked."""
        return f"{self.name}.before_model", f"{self.name}.after_model"
