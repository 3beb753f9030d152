"""The audit log of grants and revocations that get no answer."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

logger = logging.getLogger("langchain_quota")


@contextmanager
def confirming(
    event: str, key: str, name: str, fields: Mapping[str, object] | None = None
) -> Iterator[None]:
    """Log an operation without an answer: the store may have done it nevertheless.

    Args:
        event: `"grant"` or `"revoke"`.
        key: The count's key.
        name: The grant's id.
        fields: The record's other fields.
    """
    try:
        yield
    except BaseException as error:
        # A TypeError says that the store is used in a wrong way: nothing was asked.
        if not isinstance(error, TypeError):
            logger.warning(
                "%s unconfirmed under %r, id %r: it may have been done",
                event,
                key,
                name,
                extra={
                    "quota_event": f"{event}_unconfirmed",
                    "quota_key": key,
                    "quota_grant": name,
                    **(fields or {}),
                },
            )
        raise
