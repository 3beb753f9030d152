"""Locks under forks: a child finds them free, and what they guard whole."""

import gc
import os
from pathlib import Path
from textwrap import dedent

import pytest

from langchain_quota import locks
from langchain_quota.locks import fork_safe_lock
from tests.forked import run_python

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that can fork")


def forking(program: str, **environment: str) -> None:
    """Run a program that forks in a process of its own; it fails if a child does."""
    child = """
    import os, sys, threading, time, warnings
    from langchain_quota.locks import fork_safe_lock

    warnings.simplefilter("ignore", DeprecationWarning)  # from 3.12 on, of forks beside threads

    def in_child(check):
        pid = os.fork()
        if pid == 0:
            os._exit(0 if check() else 1)
        assert os.waitpid(pid, 0)[1] == 0
    """
    done = run_python(dedent(child) + dedent(program), env=os.environ | environment)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_fork_waits_for_a_change() -> None:
    """What one thread changes under locks while another forks, the child has whole or not at all.

    One of the locks is taken under the other, as a fork does not take them: it waits for neither in
    vain.
    """
    forking("""
    inner, outer = fork_safe_lock(), fork_safe_lock()
    began, accounts = threading.Event(), [100, 0]

    def transfer():
        while True:
            with outer:
                accounts[0] -= 1
                began.set()
                time.sleep(0.001)
                with inner:
                    accounts[1] += 1

    def whole():
        return sum(accounts) == 100 and inner.acquire(timeout=0) and outer.acquire(timeout=0)

    threading.Thread(target=transfer, daemon=True).start()
    for _ in range(20):
        began.clear()
        began.wait()
        in_child(whole)
    with outer, inner:
        assert accounts[1] > 0, "the parent's thread goes on"
    """)


def test_a_fork_under_a_lock() -> None:
    """A thread that forks while it holds a lock keeps it; in the child the lock is still free."""
    forking("""
    lock, other = fork_safe_lock(), fork_safe_lock()
    with lock:
        in_child(lambda: lock.acquire(timeout=0) and other.acquire(timeout=0))
        assert lock.locked()
        assert not other.locked()
    assert not lock.locked()
    """)


def test_forks_of_several_threads() -> None:
    """Threads that fork at the same time do not wait for each other's locks."""
    forking("""
    made = [fork_safe_lock() for _ in range(5)]

    def fork():
        for _ in range(10):
            in_child(lambda: all(lock.acquire(timeout=0) for lock in made))
            forked.append(1)

    forked = []
    threads = [threading.Thread(target=fork) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(forked) == 30
    """)


COUNTING = """
forking = True

def dense():
    while forking:
        count()

def hung(children, patience):
    global forking
    for _ in range(2):
        threading.Thread(target=dense, daemon=True).start()
    count()
    pids = []
    for _ in range(children):
        time.sleep(0.01)
        pid = os.fork()
        if pid == 0:
            signal.alarm(patience)  # it would never end by itself
            count()
            os._exit(0)
        pids.append(pid)
    forking = False  # the children have the processors to themselves
    return [os.waitpid(pid, 0)[1] for pid in pids].count(signal.SIGALRM)
"""


def test_what_is_counted_holds_no_lock_of_prometheus_client(tmp_path: Path) -> None:
    """A child of a process that counts without a pause counts, too; all metrics share one lock."""
    program = """
    import signal
    from langchain_quota.telemetry import recorder_of
    recorder = recorder_of(None)

    def count():
        recorder.observe_store("acquire", "ok", 0.1)
    """
    ends = "assert hung(20, patience=60) == 0\nos._exit(0)"
    forking(f"{dedent(program)}{COUNTING}{ends}", PROMETHEUS_MULTIPROC_DIR=str(tmp_path))


def test_prometheus_client_alone_hangs(tmp_path: Path) -> None:
    """An application's own metrics are not covered: a child that counts in one can hang for ever.

    Where this fails, prometheus_client outlives a fork, and the documents say so no longer.
    """
    program = """
    import signal
    from prometheus_client import Counter
    count = Counter("calls", "Calls.").inc
    """
    ends = "assert hung(5, patience=5) > 0\nos._exit(0)"
    forking(f"{dedent(program)}{COUNTING}{ends}", PROMETHEUS_MULTIPROC_DIR=str(tmp_path))


def test_a_lock_is_forgotten_with_its_owner() -> None:
    """Who makes middlewares for ever does not fill the memory with their locks."""
    made = [fork_safe_lock() for _ in range(3)]
    before = len(locks._locks)
    del made
    gc.collect()
    assert len(locks._locks) <= before - 3
