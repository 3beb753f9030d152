"""Asks people at the limits of a middleware."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from langchain_quota.admission import AcquireResult
from langchain_quota.errors import QuotaStoreError
from langchain_quota.limits import Limit
from langchain_quota.middleware._answers import KEPT
from langchain_quota.middleware._context import call_context
from langchain_quota.middleware._questions import Ask, RequestT, question_of
from langchain_quota.resolved import ResolvedLimits
from langchain_quota.stores import QuotaStore
from langchain_quota.stores.grants import Granting
from langchain_quota.telemetry.recorder import Recorder


class Questions:
    """Asks people at the limits of a middleware, and grants what they answer.

    Args:
        limit: The name of the first limit that asks.
        store: Grants more of what it counts; `None` where the state counts alone.
        recorder: Counts questions and answers.
    """

    def __init__(self, limit: str, store: Granting | None, recorder: Recorder) -> None:
        self._limit = limit
        self._store = store
        self._recorder = recorder

    def __deepcopy__(self, _: dict[int, object]) -> Self:
        """Itself: a copy of the middleware asks the same store."""
        return self

    def check_can_wait(self, runtime: Any) -> None:
        """Check that a run can wait for the answer of a person.

        Raises:
            RuntimeError: It cannot.
        """
        context = call_context(runtime, model_name=None)
        if not (context.remembers or context.invocation):
            raise RuntimeError(
                f"limit {self._limit!r} has exit_behavior='ask', and a run that waits for a person "
                "needs a checkpointer: create_agent(…, checkpointer=…)"
            )

    def put(
        self,
        request: RequestT,
        result: AcquireResult,
        limits: ResolvedLimits,
        ask: Ask[RequestT],
        acquire: Callable[[RequestT], AcquireResult],
    ) -> tuple[RequestT, AcquireResult]:
        """Ask a person about refused calls, if that helps; the newest request, and its result.

        Args:
            request: The calls.
            result: The answer to them, before a person is asked.
            limits: The limits for which the request was made.
            ask: Makes a request.
            acquire: Gets the answer to a request.

        Raises:
            QuotaStoreError: The store could not be asked. Resume the run again: nothing is granted
                twice.
        """
        question = question_of(request, result)
        question.put(self._recorder)
        if question.is_rejected:
            return request, result
        with self._keeping_answer():
            for key, grant in question.of_store():
                self._granting().grant(key, **grant)
        again = question.again(limits, ask)
        return again, acquire(again)

    async def aput(
        self,
        request: RequestT,
        result: AcquireResult,
        limits: ResolvedLimits,
        ask: Ask[RequestT],
        acquire: Callable[[RequestT], Awaitable[AcquireResult]],
    ) -> tuple[RequestT, AcquireResult]:
        """`put`, without blocking the event loop."""
        question = question_of(request, result)
        question.put(self._recorder)
        if question.is_rejected:
            return request, result
        with self._keeping_answer():
            for key, grant in question.of_store():
                await self._granting().agrant(key, **grant)
        again = question.again(limits, ask)
        return again, await acquire(again)

    @contextmanager
    def _keeping_answer(self) -> Iterator[None]:
        try:
            yield
        except QuotaStoreError as error:
            self._recorder.record_error("store", error)
            raise QuotaStoreError(KEPT) from error

    def _granting(self) -> Granting:
        assert self._store is not None  # noqa: S101 - for the type checker: it keeps the key
        return self._store


def questions_of(
    limits: Sequence[Limit], store: QuotaStore | None, recorder: Recorder
) -> Questions | None:
    """What asks people at limits; `None` if no limit asks.

    Raises:
        TypeError: A limit asks, and the store cannot grant more.
    """
    asking = [each.name for each in limits if each.enforce and each.exit_behavior == "ask"]
    if not asking:
        return None
    if store is not None and not isinstance(store, Granting):
        raise TypeError(
            "exit_behavior='ask' needs a store that can grant more, as MemoryStore and RedisStore "
            f"can, not {store!r}"
        )
    return Questions(asking[0], store, recorder)
