"""The shard that has the counts of a run, or of a thread between runs."""

from typing import Any

from langchain_core.runnables import RunnableConfig

from langchain_quota.decision import THREAD
from langchain_quota.middleware._context import call_context, checked_subject, subject_of


def shard_of(shard_by: str | None, runtime: Any) -> str:
    """The shard that has the counts of the running node's calls.

    Args:
        shard_by: The name of the value that is the shard; `None` for a store without shards.
        runtime: The hook's runtime.
    """
    if shard_by is None:
        return ""
    caller = call_context(runtime, model_name=None)
    return subject_of(f"the store's shard_by={shard_by!r}", shard_by, runtime, caller)


def shard_in(config: RunnableConfig, shard_by: str | None) -> str:
    """The shard that has the counts of a thread.

    Args:
        config: Names the thread and the shard.
        shard_by: The name of the value that is the shard; `None` for a store without shards.

    Raises:
        ValueError: The config does not name the shard.
    """
    if shard_by is None:
        return ""
    name = "thread_id" if shard_by == THREAD else shard_by
    value = config.get("configurable", {}).get(name)
    if value is None:
        raise ValueError(
            f"config does not name the shard of a store with shard_by={shard_by!r}: add {name!r} "
            'to {"configurable": {"thread_id": …}}'
        )
    return checked_subject(f"the store's shard_by={shard_by!r}", value)
