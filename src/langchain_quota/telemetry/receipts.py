"""Receipts: what the runs of a block have used, for the code that starts them."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from itertools import chain
from typing import Any
from uuid import UUID

from langchain_quota.core.decide import Verdict
from langchain_quota.core.decision import Outcome, Refund
from langchain_quota.limits.call import Call, Kind, ModelUsage
from langchain_quota.runtime.sync_async import fork_safe_lock
from langchain_quota.runtime.units import NANODOLLARS, as_dollars, as_time
from langchain_quota.telemetry.labels import UNNAMED


@dataclass(slots=True)
class ReceiptLine:
    """What an agent has used of a model or a tool: calls, tokens, and nanodollars.

    `estimated` calls have no report of their tokens. `blocked` has the calls that did not run, by
    limit. `nanodollars` is `None` if a price is unknown; `reported_nanodollars` are those of them
    that the provider has named. Agents and models may have no name.

    Examples:
        >>> from langchain_quota.telemetry.receipts import ReceiptLine
        >>> str(ReceiptLine("researcher", "tool", "search", calls=2))
        'search: 2 calls'
    """

    agent: str
    kind: Kind
    name: str
    calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    estimated: int = 0
    nanodollars: int | None = 0
    reported_nanodollars: int = 0
    blocked: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        text = f"{self.name or self.kind}: {self.calls:,} call{'s' * (self.calls != 1)}"
        if self.kind == "model" and self.calls:
            text += f", {self.total_tokens:,} tokens{' (estimated)' * bool(self.estimated)}"
        if self.nanodollars is None or self.nanodollars:
            text += ", " + as_dollars(self.nanodollars) if self.nanodollars else ", cost unknown"
        if self.reported_nanodollars:
            text += f" ({as_dollars(self.reported_nanodollars)} reported by the provider)"
        return text + "".join(f", {n:,} blocked by {limit}" for limit, n in self.blocked.items())


def _add(
    line: ReceiptLine,
    more: ReceiptLine | ModelUsage,
    calls: int,
    nanodollars: int | None,
    reported_nanodollars: int = 0,
) -> None:
    """Add another line, or a model call, to a line."""
    line.reported_nanodollars += reported_nanodollars
    line.calls += calls
    for name in ("input_tokens", "output_tokens", "total_tokens", "estimated"):
        setattr(line, name, getattr(line, name) + getattr(more, name))
    known = line.nanodollars is not None and nanodollars is not None
    line.nanodollars = (line.nanodollars or 0) + (nanodollars or 0) if known else None


@dataclass(eq=False)
class Receipt:
    """What the runs of a `with` block, and all that they start, have used. Its text is a tree.

    Attributes:
        runs: Outermost runs; one that is interrupted and resumed in the block is one.
        seconds: Time that the block has taken, waits included; 0 until it ends.
        ended_by: The agents whose runs limits have ended, sub-agents among them, with the limit.

    Examples:
        >>> from langchain_quota import CostLimit, QuotaMiddleware
        >>> with QuotaMiddleware([CostLimit(enforce=False)], prices={}).receipt() as bill:
        ...     pass  # agent.invoke(…)
        >>> bill.runs, bill.total("model").calls, bill.dollars
        (0, 0, Decimal('0'))
    """

    runs: int = 0
    seconds: float = 0.0
    ended_by: list[tuple[str, str]] = field(default_factory=list)
    _lines: dict[tuple[str, Kind, str], ReceiptLine] = field(default_factory=dict, repr=False)

    @property
    def lines(self) -> Sequence[ReceiptLine]:
        """What was used, by agent, kind and name."""
        return [line for _, line in sorted(self._lines.items())]

    def total(self, kind: Kind) -> ReceiptLine:
        """Return what was used of all models, or of all tools."""
        total = ReceiptLine("", kind, f"all {kind}s")
        for line in self.lines:
            if line.kind == kind:
                _add(total, line, line.calls, line.nanodollars, line.reported_nanodollars)
                total.blocked = dict(Counter(total.blocked) + Counter(line.blocked))
        return total

    @property
    def dollars(self) -> Decimal | None:
        """Cost of all model calls and paid tool calls; `None` if a price is unknown."""
        models, tools = self.total("model").nanodollars, self.total("tool").nanodollars
        return None if models is None else Decimal(models + (tools or 0)) / NANODOLLARS

    def as_dict(self) -> dict[str, Any]:
        """Return all that it has as plain data for JSON, with dollars as a float."""
        dollars = None if self.dollars is None else float(self.dollars)
        totals = {f"{kind}s": asdict(self.total(kind)) for kind in ("model", "tool")}
        numbers = {"runs": self.runs, "seconds": self.seconds, "dollars": dollars, **totals}
        return {**numbers, "ended_by": self.ended_by, "lines": [*map(asdict, self.lines)]}

    def __str__(self) -> str:
        agents: dict[str, list[object]] = {}
        for line in self.lines:
            agents.setdefault(line.agent, []).append(line)
        for agent, limit in self.ended_by:
            agents.setdefault(agent, []).append(f"ended by {limit}")
        text = [f"{self.runs:,} run{'s' * (self.runs != 1)}, {as_time(round(self.seconds * 1000))}"]
        text += [str(self.total("model")), str(self.total("tool"))]
        for agent, rows in agents.items():
            text += [agent or UNNAMED, *(f"  {row}" for row in rows)]
        return "\n  ".join(text)


class OpenReceipt(Receipt):
    """A receipt that its block still writes."""

    def __init__(self, price: Callable[[ModelUsage], tuple[int | None, str]]) -> None:
        super().__init__()
        self.running: dict[UUID, Any] = {}
        """The model runs of budgets that have not ended, and the lines of tools that run."""
        self._price = price
        self._threads: set[object] = set()
        self._paid: Counter[tuple[str | None, ...]] = Counter()
        self._lock = fork_safe_lock()

    def begin_run(self, thread: object, *, resumes: bool) -> None:
        """Count an outermost run, unless it resumes one of this block."""
        with self._lock:
            self.runs += not (resumes and thread in self._threads)
            self._threads.add(thread)

    def start_tool(self, run: UUID, agent: str, tool: str) -> None:
        """Count a tool call."""
        with self._lock:
            self.running[run] = line = self._line(agent, "tool", tool)
            line.calls += 1

    def end(self, run: UUID, *, interrupted: bool = False) -> None:
        """Count a model call that ends; do not count a tool call that will run again."""
        with self._lock:
            ended = self.running.pop(run, None)
            if isinstance(ended, ReceiptLine):
                ended.calls -= interrupted
            elif ended is not None:
                usage: ModelUsage = ended.now().usage
                line = self._line(ended.agent, "model", next(iter(usage.models), ""))
                nanodollars, source = self._price(usage)
                reported = nanodollars or 0 if source == "reported" else 0
                _add(line, ModelUsage() if usage.cached else usage, 1, nanodollars, reported)

    def add_verdicts(self, verdicts: Sequence[Verdict], *, ended_by: str = "") -> None:
        """Add blocked calls, what allowed tool calls cost, and the limit that ends the run."""
        for verdict in verdicts:
            call = verdict.call
            if verdict.outcome is Outcome.BLOCKED:
                # A call is also blocked where a limit refuses another one with its id.
                others = (one for one in verdicts if one.call.id == call.id)
                checks = chain(*(one.decision.limits for one in (verdict, *others)))
                limit = next((one.limit for one in checks if one.refused and one.enforced), "")
                with self._lock:
                    blocked = self._line(call.agent or "", call.kind, call.tool or "").blocked
                    blocked[limit] = blocked.get(limit, 0) + 1
            elif verdict.outcome is not Outcome.SKIPPED and call.kind == "tool":
                self._pay(call, verdict.cost)
        if ended_by:
            self.ended_by.append((verdicts[0].call.agent or "", ended_by))

    def refund(self, refunds: Sequence[Refund]) -> None:
        """Refund what tool calls of this block have cost."""
        for call, _, cost in refunds:
            # Several limits may have charged a call, which was paid once.
            self._pay(call, -min(cost, self._paid[call.agent, call.tool, call.id]))

    def _pay(self, call: Call, cost: int) -> None:
        with self._lock:
            if cost:
                line = self._line(call.agent or "", "tool", call.tool or "")
                _add(line, ModelUsage(), 0, cost)
                self._paid[call.agent, call.tool, call.id] += cost

    def _line(self, agent: str, kind: Kind, name: str) -> ReceiptLine:
        return self._lines.setdefault((agent, kind, name), ReceiptLine(agent, kind, name))


_open: ContextVar[tuple[OpenReceipt, ...]] = ContextVar("langchain_quota_receipts", default=())
ALL_OPEN: set[OpenReceipt] = set()  # in this process


@contextmanager
def opened(receipt: OpenReceipt) -> Iterator[Receipt]:
    """Open a receipt for what the block runs, and for the tasks and threads that it starts."""
    began = time.monotonic()
    ALL_OPEN.add(receipt)
    token = _open.set((*_open.get(), receipt))
    try:
        yield receipt
    finally:
        ALL_OPEN.discard(receipt)
        # A generator may be closed in another context.
        with suppress(ValueError):
            _open.reset(token)
        # What goes on is counted as it is now.
        for run in [*receipt.running]:
            receipt.end(run)
        receipt.seconds = time.monotonic() - began


def open_receipts(*handlers: object) -> Sequence[OpenReceipt]:
    """Return the open receipts of this context, and of the run's callback handlers."""
    if not ALL_OPEN:
        return ()
    from langchain_core.runnables.config import var_child_runnable_config as var  # noqa: PLC0415 - its import is slow

    callbacks = (var.get() or {}).get("callbacks")
    inherited = (*handlers, *getattr(callbacks, "inheritable_handlers", ()))
    more = (receipt for handler in inherited for receipt in getattr(handler, "receipts", ()))
    return [one for one in dict.fromkeys((*_open.get(), *more)) if one in ALL_OPEN]
