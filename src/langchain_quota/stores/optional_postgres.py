"""`PostgresStore`, or its replacement if the package psycopg is missing."""

try:
    from langchain_quota.stores.postgres import PostgresStore
except ModuleNotFoundError as _missing:
    _REASON = str(_missing)

    class PostgresStore:  # type: ignore[no-redef]  # takes its place
        """A `QuotaStore` in PostgreSQL; it needs the package psycopg, which is not installed."""

        def __init__(self, *_: object, **__: object) -> None:
            raise ModuleNotFoundError(_REASON, name="psycopg")


__all__ = ["PostgresStore"]
