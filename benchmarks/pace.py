"""Processes that share the pace of a provider, and processes that do not: errors 429, and use."""

from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.report import Ratio, Result, Size, Table, required

REQUESTS, SECONDS = 500, 15.0
"""What a provider allows in a minute, and after how long something happens to the processes."""


def measure(size: Size) -> Result:
    """Measure, where there is a Redis server and the client of a provider."""
    try:
        with required():
            from tests.server.redis import running_redis  # noqa: PLC0415 - needs redis
            from tests.server.test_model_pace import TOKENS, play  # noqa: PLC0415 - and openai

            with TemporaryDirectory(prefix="pace-") as directory:
                with running_redis(Path(directory)) as redis:
                    paced = play(REQUESTS, 1.0, SECONDS, size.periods, redis)
                free = play(REQUESTS, 1.0, SECONDS, 1)
    except LookupError:
        return Result()
    rows = []
    for name, (provider, times) in (("without a pace", free), ("ModelPaceMiddleware", paced)):
        periods = [
            sum(start <= at < end for at in provider.refusals) for start, end in pairwise(times)
        ]
        use = provider.use(times[0], times[-1])
        rows.append(
            [
                name,
                f"{len(provider.accepted):,}",
                f"{len(provider.refusals) - sum(periods):,}",
                ", ".join(f"{refusals:,}" for refusals in periods),
                f"{use:.1%}",
                f"{max(0.0, provider.over()):.1%}",
            ]
        )
    columns = (
        *("", "answers", "errors 429 at first", "errors 429 in later periods"),
        *("use of the rate", "most beyond rate and burst"),
    )
    note = (
        f"Four processes with 25 callers each share a provider that allows {REQUESTS} requests and "
        f"{REQUESTS * TOKENS:,} tokens a minute. With the pace, a process is killed and started "
        f"again in the second of periods of {SECONDS:.0f} seconds, and Redis loses its counts in "
        "the third. *errors 429 at first*: until a period after the limit was first reached. "
        "*beyond rate and burst*: of all that is sent, in any time, by the provider's count."
    )
    table = Table("The pace of a provider", columns, rows, note)
    ratios = [
        Ratio("errors 429 in a period under the pace", 1, max(periods)),
        Ratio("unused share of the rate under the pace", 0.1, 1 - use),
    ]
    return Result(table, ratios=ratios)
