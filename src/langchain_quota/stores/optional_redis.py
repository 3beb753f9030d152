"""`RedisStore`, or its replacement if the package redis is missing."""

try:
    from langchain_quota.stores.redis import RedisStore
except ModuleNotFoundError as _missing:
    _REASON = str(_missing)

    class RedisStore:  # type: ignore[no-redef]  # takes its place
        """A `QuotaStore` in Redis; it needs the package redis, which is not installed."""

        def __init__(self, *_: object, **__: object) -> None:
            raise ModuleNotFoundError(_REASON, name="redis")


__all__ = ["RedisStore"]
