"""The errors of stores, which need no LangChain."""

UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What is raised where a server's reply has an unexpected form; elsewhere it is a bug."""


class QuotaStoreError(Exception):
    """A store was unavailable, or could not do what was requested.

    Args:
        message: What happened; never with credentials.
        timed_out: Whether the store did not answer in time.

    Examples:
        >>> from langchain_quota import MemoryStore
        >>> from langchain_quota.errors import QuotaStoreError
        >>> try:
        ...     MemoryStore(max_keys=1).reset(["search:user_id:ada", "search:user_id:bob"])
        ... except QuotaStoreError as error:
        ...     print(f"{error}, timed out: {error.timed_out}")
        the store is full: it keeps 1 counts at most, timed out: False
    """

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class ReservationsFullError(QuotaStoreError):
    """A count that drains can have no more reservations until one is settled, or its lease ends."""


class AttemptCorrectedError(QuotaStoreError):
    """An attempt arrived behind its correction, and charges nothing."""

    def __init__(self) -> None:
        super().__init__("the attempt was corrected before it arrived")


class EventLoopBlockedError(QuotaStoreError):
    """A store did not answer in time, and for most of that time the event loop was blocked.

    The store may work well, so first look for what blocks the event loop. The async methods of
    `RedisStore` and `PostgresStore` raise it. `langchain_quota_errors_total` counts it by its name.

    Args:
        message: What happened; never with credentials.
        timed_out: Whether the store did not answer in time; true if this library raises the error.

    Examples:
        >>> from langchain_quota.errors import EventLoopBlockedError, QuotaStoreError
        >>> issubclass(EventLoopBlockedError, QuotaStoreError)
        True
    """
