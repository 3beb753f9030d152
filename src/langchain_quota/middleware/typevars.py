"""The type of an agent's context, in which the middlewares are generic.

`AgentMiddleware` is invariant in state and context, and a list of middlewares has one type of each.
So ours say `Any` for the state, and for a context that is not given: they go beside all others.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langgraph._internal._typing import StateLike
    from typing_extensions import TypeVar

    ContextT = TypeVar("ContextT", bound=StateLike | None, default=Any)
else:
    from langgraph.typing import ContextT

__all__ = ["ContextT"]
