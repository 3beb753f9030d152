"""How much is measured."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        rounds: How often each set-up has its turn.
        steps: The two numbers of steps, of which the difference is counted.
        decisions: The two numbers of decisions, likewise.
        concurrent: How many runs go on at the same time, and of how many steps each is.
        crowds: How often they do so, in turns.
        tracked: How many threads there are when metrics are scraped.
        scrapes: How often.
        requests: How often a store is asked.
        worker_threads: How many threads each of several workers has when they are scraped.
        remembered: How many threads, counts and requests are kept when their memory is measured.
        minutes: How many minutes a provider's pace is kept.
        counts_instructions: Whether callgrind counts, where it is found; it takes some minutes.
    """

    rounds: int
    steps: tuple[int, int]
    decisions: tuple[int, int]
    concurrent: tuple[int, int]
    crowds: int
    tracked: tuple[int, ...]
    scrapes: int
    requests: int
    worker_threads: int
    remembered: int
    minutes: int
    counts_instructions: bool


FULL = Size(
    rounds=30,
    steps=(2, 12),
    decisions=(200, 1_200),
    concurrent=(1_000, 2),
    crowds=2,
    tracked=(1_000, 10_000, 100_000),
    scrapes=15,
    requests=2_000,
    worker_threads=5_000,
    remembered=5_000,
    minutes=5,
    counts_instructions=True,
)

QUICK = Size(
    rounds=2,
    steps=(1, 4),
    decisions=(100, 600),
    concurrent=(50, 2),
    crowds=1,
    tracked=(1_000, 3_000),
    scrapes=3,
    requests=100,
    worker_threads=500,
    remembered=1_000,
    minutes=1,
    counts_instructions=False,
)
