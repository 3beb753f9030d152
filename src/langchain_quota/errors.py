"""The exceptions and warnings. An `except` for LangChain's exceptions catches ours."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from langchain.agents.middleware import model_call_limit, tool_call_limit
from langchain_core.messages import AnyMessage

from langchain_quota.runtime.arguments import QuotaWarning as QuotaWarning
from langchain_quota.runtime.store_errors import EventLoopBlockedError as EventLoopBlockedError
from langchain_quota.runtime.store_errors import QuotaStoreError as QuotaStoreError

if TYPE_CHECKING:
    from langchain_quota.core.decision import Decision
    from langchain_quota.middleware.thread_usage import ThreadUsage


class _CopiedError(Exception):
    """An exception that is copied and pickled with its text and its attributes."""

    # By default a copy is made by calling `__init__` with the text, but our `__init__` takes other
    # arguments and makes the text from them.
    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...], dict[str, object]]:
        return type(self).__new__, (type(self), *self.args), vars(self)


class LimitError(_CopiedError):
    """The base of the errors of limits, which carry the work of the run up to the refusal."""

    messages: Sequence[AnyMessage] = ()
    usage: "ThreadUsage | None" = None

    def __init__(
        self,
        *counts: object,
        message: str | None = None,
        decision: "Decision | None" = None,
        **named: object,
    ) -> None:
        super().__init__(*counts, **named)
        if message is not None:
            self.args = (message,)
        self.decision = decision

    # An error may be sent to another process or kept, where a user's messages do not belong.
    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...], dict[str, object]]:
        make, arguments, attributes = super().__reduce__()
        work = ("messages", "usage")
        kept = {name: value for name, value in attributes.items() if name not in work}
        return make, arguments, kept


class ToolCallLimitExceededError(LimitError, tool_call_limit.ToolCallLimitExceededError):
    """A tool call limit with `exit_behavior="error"` refused a call.

    A subclass of LangChain's exception of the same name, with its arguments and its text, or that
    of `message`.

    Attributes:
        thread_count: The thread's count, in calls, as if the blocked calls had run.
        run_count: The run's count, in calls, as if the blocked calls had run.
        thread_limit: The thread's limit, in calls; `None` for none.
        run_limit: The run's limit, in calls; `None` for none.
        tool_name: The limited tool, or tools; `None` for all tools.
        decision: The refusal; `None` for an exception that no middleware raised.
        messages: The messages of the run up to the refusal, so that its work is not lost without a
            checkpointer. Neither its text nor a pickle has them.
        usage: What the thread and the run have used; `None` for an exception that no middleware
            raised, and in a pickle.

    Examples:
        >>> from langchain_quota import ToolCallLimitExceededError
        >>> str(ToolCallLimitExceededError(4, 4, None, 3, "search"))
        "'search' tool call limit reached: run limit exceeded (4/3 calls)."
    """


class ModelCallLimitExceededError(LimitError, model_call_limit.ModelCallLimitExceededError):
    """A model call limit or a budget with `exit_behavior="error"` refused a model call.

    A subclass of LangChain's exception of the same name, with its arguments and its text, or that
    of `message`. The unit of the counts is that of the limit: calls, tokens, nanodollars or
    milliseconds.

    Attributes:
        thread_count: The thread's count, in the limit's unit, before the blocked call.
        run_count: The run's count, in the limit's unit, before the blocked call.
        thread_limit: The thread's limit, in its unit; `None` for none.
        run_limit: The run's limit, in its unit; `None` for none.
        decision: The refusal; `None` for an exception that no middleware raised.
        messages, usage: As in `ToolCallLimitExceededError`.

    Examples:
        >>> from langchain_quota import ModelCallLimitExceededError
        >>> str(ModelCallLimitExceededError(9, 3, None, 3))
        'Model call limits exceeded: run limit (3/3)'
    """


class UnknownPriceError(_CopiedError, LookupError):
    """No price is known for the tokens of a model.

    Args:
        model: The model, by the most exact name that is known.
        provider: The provider that serves it, as LangChain names it; empty if unknown.
        reason: Why the price is not known, if it is not simply missing.

    Examples:
        >>> from langchain_quota.errors import UnknownPriceError
        >>> error = UnknownPriceError("my-deployment", "azure")
        >>> (error.model, error.provider)
        ('my-deployment', 'azure')
    """

    def __init__(self, model: str, provider: str = "", *, reason: str = "") -> None:
        served = f" of {provider!r}" if provider else ""
        if reason:
            text = f"the price of the model {model!r}{served} is not known: {reason}"
        elif model:
            text = (
                f"no price is known for the model {model!r}{served}: give it, "
                f"prices={{{model!r}: Price(input=2.50, output=10)}}, in dollars per million "
                "tokens; or give the chat model the name that its provider lists, model=. Its own "
                "class also names the provider: _get_ls_params returns ls_provider, as 'openai'"
            )
        else:
            text = (
                f"no price is known for a model{served} that has no name: give its class a field "
                "model or model_name, or give QuotaMiddleware prices= as a function, such as "
                'prices=lambda usage: Decimal("0.01")'
            )
        super().__init__(text)
        self.model = model
        self.provider = provider
