"""The exceptions and warnings. An `except` written for LangChain's limiters catches ours."""

from langchain.agents.middleware import model_call_limit, tool_call_limit

from langchain_quota.decision import Decision


class ToolCallLimitExceededError(tool_call_limit.ToolCallLimitExceededError):
    """A tool call limit with `exit_behavior="error"` refused a call.

    Args:
        thread_count, run_count: The counts, in calls, as if the refused calls had run.
        thread_limit, run_limit: The limits; `None` for none.
        tool_name: The limited tool, or tools; `None` for all tools.
        message: The text; by default made from the counts.
        decision: The refusal; `None` for an exception that no middleware raised.
    """

    def __init__(  # noqa: PLR0913 - LangChain's arguments, and ours
        self,
        thread_count: int,
        run_count: int,
        thread_limit: int | None,
        run_limit: int | None,
        tool_name: str | None = None,
        *,
        message: str | None = None,
        decision: Decision | None = None,
    ) -> None:
        super().__init__(thread_count, run_count, thread_limit, run_limit, tool_name)
        if message is not None:
            self.args = (message,)
        self.decision = decision


class ModelCallLimitExceededError(model_call_limit.ModelCallLimitExceededError):
    """A model call limit with `exit_behavior="error"` refused a call.

    Args:
        thread_count, run_count: The counts, in calls, before the refused call.
        thread_limit, run_limit: The limits; `None` for none.
        message: The text; by default made from the counts.
        decision: The refusal; `None` for an exception that no middleware raised.
    """

    def __init__(  # noqa: PLR0913 - LangChain's arguments, and ours
        self,
        thread_count: int,
        run_count: int,
        thread_limit: int | None,
        run_limit: int | None,
        *,
        message: str | None = None,
        decision: Decision | None = None,
    ) -> None:
        super().__init__(thread_count, run_count, thread_limit, run_limit)
        if message is not None:
            self.args = (message,)
        self.decision = decision


class QuotaWarning(UserWarning):
    """A limit is set up so that it cannot hold as its user will expect."""


class QuotaStoreError(Exception):
    """A store could not be asked, or could not answer.

    Args:
        message: What happened; never with credentials.
        timed_out: Whether it did not answer in time.
    """

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out
