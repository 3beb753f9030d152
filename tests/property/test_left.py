"""What is left of a limit in dollars, by names, against what random agents' calls really cost."""

import asyncio
import random
from collections import Counter
from contextlib import closing
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_quota import CostLimit, Decision, MemoryStore, Quota
from langchain_quota.stores.redis import RedisStore
from tests.examples import examples
from tests.scene import Form, Scene
from tests.server.redis import RedisServer
from tests.stores import Clock
from tests.telemetry import paid, telling

Step = tuple[str, str, int]
"""What happens, to which tenant, and an amount: of cents, or of hours."""
ACTIONS = ["run", "run", "run", "grant", "revoke", "reset", "wait"]
TENANTS = ["acme", "beta"]
steps = st.tuples(st.sampled_from(ACTIONS), st.sampled_from(TENANTS), st.integers(1, 40))
DAY = 86_400


class World:
    """An agent of two tenants, and what their calls really cost, in cents of this day."""

    def __init__(self, store: Any, clock: Clock | None, form: Form) -> None:
        self.clock, self.form = clock, form
        self.spent, self.granted = Counter[str](), Counter[str]()
        self.grants: dict[str, Any] = {}
        self.decisions: list[Decision] = []
        self.tenant, self.cents, self.runs = "", 0, 0
        quota = Quota("1.50", per="tenant", window="day")
        self.scene = Scene(
            telling(spans="off"),
            self.answer,
            [CostLimit(quotas=[quota], name="money", tool_prices={"search": "0.05"})],
            form=form,
            store=store,
            prices=lambda used: Decimal(used.total_tokens) / 100,
            on_decision=self.decisions.append,
        )

    def answer(self, messages: Any) -> Any:
        self.spent[self.tenant] += self.cents
        return paid(self.cents, *["search"] * (messages[-1].type == "human"))

    async def call(self, method: str, *names: Any) -> Any:
        if self.form == "sync":
            return getattr(self.scene.quota, method)("money", *names, tenant=self.tenant)
        return await getattr(self.scene.quota, f"a{method}")("money", *names, tenant=self.tenant)

    async def run(self, cents: int) -> None:
        self.cents, self.runs, ran = cents, self.runs + 1, len(self.scene.ran)
        self.decisions.clear()
        await self.scene.play(context={"tenant": self.tenant}, thread_id=self.runs)
        self.spent[self.tenant] += 5 * (len(self.scene.ran) - ran)

    async def step(self, what: str, amount: int) -> None:
        if what == "run":
            await self.run(amount)
        elif what == "grant":
            self.grants[self.tenant] = await self.call("grant", Decimal(amount) / 100)
            self.granted[self.tenant] += amount
        elif what == "revoke" and self.tenant in self.grants:
            ended = await self.call("revoke", self.grants[self.tenant].id)
            self.granted[self.tenant] -= ended.amount // 10**7 if ended else 0
        elif what == "reset":
            await self.call("reset")
            self.spent[self.tenant] = 0
        elif what == "wait" and self.clock is not None:
            day, self.clock.now = self.clock.now // DAY, self.clock.now + amount * 3600
            if day != self.clock.now // DAY:
                self.spent, self.granted = Counter(), Counter()

    async def check(self) -> Any:
        """Assert that what is left equals the limit and the grants less what was spent."""
        balance, of = await self.call("left"), self.tenant
        used, limit = (Decimal(cents) / 100 for cents in (self.spent[of], 150 + self.granted[of]))
        left = max(0, limit - used)
        assert (balance.used, balance.limit, balance.left) == (used, limit, left)
        assert balance.unit == "dollars"
        return balance


async def play(plan: list[Step], world: World) -> None:
    """Take the steps; in the end, the decisions say the same as what is left."""
    for what, world.tenant, amount in plan:
        await world.step(what, amount)
        await world.check()
    for world.tenant in TENANTS:
        balance = await world.check()
        await world.run(1)
        [status] = world.decisions[0].limits
        count: Any = status.count_of("tenant")
        amounts = balance.used * 10**9, balance.limit * 10**9
        assert (count.before, count.limit, count.resets_at) == (*amounts, balance.resets_at)
        assert status.refused == (balance.left == 0)


@examples(40)
@given(plan=st.lists(steps, max_size=14), form=st.sampled_from(["sync", "async"]))
def test_left(plan: list[Step], form: Form) -> None:
    """Of any runs, grants, revocations, resets and windows, each dollar is left or was spent."""
    clock = Clock()
    asyncio.run(play(plan, World(MemoryStore(clock=clock), clock, form)))


@pytest.mark.rest
def test_left_in_redis(redis_server: RedisServer) -> None:
    """The same in Redis, without the windows."""
    chance = random.Random(4711)  # noqa: S311 - no secret
    plan = [
        (chance.choice(ACTIONS), chance.choice(TENANTS), chance.randint(1, 40)) for _ in range(60)
    ]
    with closing(RedisStore(redis_server.url, prefix=redis_server.prefix(), timeout=30)) as store:
        asyncio.run(play(plan, World(store, None, "async")))
