"""Runs under callgrind: each workload in forked children of one process.

A child counts on from what its parent has counted, so the difference of two children that differ
only in how often they repeat something is what that costs.
"""

import gc
import json
import os
import sys
from pathlib import Path

from benchmarks.workloads import KINDS, Checking, Counting, Step, Work, prepare

Job = tuple[Work, int]


def main(directory: Path) -> None:
    """Do the jobs, some at a time, and write down which process did which."""
    jobs: list[Job] = [
        (KINDS[kind](*arguments), times)
        for kind, arguments, times in json.loads((directory / "jobs.json").read_text())
    ]
    # What is imported and cached on the first use.
    prepare(Checking(1))
    prepare(Counting())
    prepare(Step("Inline, 1", has_memory=True))
    # The collector's runs come when they come; they would be counted with either.
    gc.collect()
    gc.freeze()
    gc.disable()
    done: dict[int, int] = {}
    running = 0
    for index, job in enumerate(jobs):
        if running == (os.cpu_count() or 1):
            _wait()
            running -= 1
        done[_forked(job)] = index
        running += 1
    for _ in range(running):
        _wait()
    (directory / "done.json").write_text(json.dumps(done))


def _forked(job: Job) -> int:
    child = os.fork()
    if child == 0:
        work, times = job
        failed = 1
        try:
            prepare(work)(times)
            failed = 0
        finally:
            sys.stderr.flush()
            os._exit(failed)
    return child


def _wait() -> None:
    child, status = os.wait()
    if status:
        raise RuntimeError(f"process {child} ended with {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
