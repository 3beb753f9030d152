"""Whose calls a store counts together as those of a root run: its thread, and a number.

The store numbers the root runs of a thread, so another process finds a run that it resumes.
"""

import time
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from langchain_quota.admission import AcquireRequest, Counter, Hits
from langchain_quota.decision import ROOT_RUN
from langchain_quota.features.root_run.run import RootRun, log_lost, root_run
from langchain_quota.middleware._context import CallContext, call_context
from langchain_quota.middleware._form import Form, ask
from langchain_quota.middleware._store import StoreClient
from langchain_quota.state import ledger
from langchain_quota.stores.keys import CountKey
from langchain_quota.telemetry.recorder import Recorder


async def root_subject(  # noqa: PLR0913, PLR0917 - what a hook knows
    form: Form,
    state: Mapping[str, Any],
    runtime: Any,
    store: StoreClient | None,
    prefix: str,
    recorder: Recorder,
) -> str:
    """Whose calls a store counts together with those of the running node."""
    if store is None:
        return ""
    run, caller = root_run(), call_context(runtime, model_name=None)
    subject = _known(run, state, caller, recorder)
    if run is None or subject is not None:
        return subject or caller.run()
    thread, key = _numbered(run, caller, prefix)
    found = (await ask(form, store, "peek", [key]) or {}).get(key) if run.resumes else None
    number = None if found is None else found.used
    if number is None:
        answer = await ask(form, store, "ask", _addition(key, run.key))
        number = None if answer is None else answer.used[key] + 1
    return run.key if number is None else _count(run, f"{thread}@{number}", caller, recorder)


def _known(
    run: RootRun | None, state: Mapping[str, Any], caller: CallContext, recorder: Recorder
) -> str | None:
    """The subject if it is known without the store. A run that resumes has it in its state."""
    known = ledger(state)
    kept = known.get("root_run")
    if run is None or (kept is not None and run.subject is not None):
        return kept
    if kept is not None:
        run.learn_used(known.get("root_used") or {})
        run.lost = None
        return run.count_as(kept)
    if run.subject is None and _thread(run, caller) is None:
        return _count(run, run.key, caller, recorder)
    return run.subject


def _count(run: RootRun, subject: str, caller: CallContext, recorder: Recorder) -> str:
    """Begin a budget, and say so if another root run may have one for these calls."""
    run.count_as(subject)
    lost, run.lost = run.lost, None
    if lost is not None:
        recorder.record_lost_root_run(caller.agent, lost)
        log_lost(lost)
    return subject


def _numbered(run: RootRun, caller: CallContext, prefix: str) -> tuple[object, str]:
    """The thread of a root run, and where a store keeps the number of its newest one."""
    # The number begins with the time. So a thread whose number has expired never gets an old one.
    thread = _thread(run, caller)
    return thread, str(CountKey("", ROOT_RUN, str(thread), prefix=prefix))


def _addition(key: str, name: str) -> AcquireRequest:
    """A request to add one to a count that begins with the time; its name makes it count once."""
    counters = {key: Counter(key, used=int(time.time()), mirrored=True)}
    return AcquireRequest(name, uuid4().hex, counters, (Hits({key: 1}),))


def _thread(run: RootRun, caller: CallContext) -> object:
    return caller.run_thread_id if run.thread_id is None else run.thread_id
