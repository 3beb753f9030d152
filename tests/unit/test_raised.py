"""What calls have asked of limits, when grants are known."""

from langchain_quota import RepeatLimit, TokenLimit, ToolCallLimit
from langchain_quota.decision import Call
from langchain_quota.raised import asked_again, raised
from langchain_quota.resolved import ResolvedLimit, ResolvedLimits, run_counter

TOKENS = TokenLimit(run_limit=100, reserve=10)


def test_a_call_reserves_the_same() -> None:
    """What a call reserves of a budget, or leaves of it, is not changed by a grant."""
    limits = ResolvedLimits([ResolvedLimit.of(TOKENS)])
    more = raised(limits, {run_counter(TOKENS): 50})
    call, bounds = Call("model"), {TOKENS.name: 40}
    before, after = limits.asked(call), more.asked(call)
    asked = [before, before.reserving(bounds), before.keeping()]
    assert asked_again(asked, limits, more) == [after, after.reserving(bounds), after.keeping()]


def test_limits_without_a_grant_stay_as_they_are() -> None:
    """A limit that has counts for each call keeps them when another limit is raised."""
    search = ToolCallLimit("search", run_limit=3)
    repeats = ResolvedLimit.of(RepeatLimit(2))
    limits = ResolvedLimits([ResolvedLimit.of(search), repeats])
    more = raised(limits, {run_counter(search): 5})
    asked = limits.asked(Call("tool", "search"))
    [_, (_, rows)] = asked.limits
    own = tuple(row._replace(counter=f"{row.counter}/call") for row in rows)
    asked = asked._replace(limits=(asked.limits[0], (repeats, own)))
    [again] = asked_again([asked], limits, more)
    assert [rows[1].most for _, rows in again.limits] == [8, 2]
    assert again.limits[1] == (repeats, own)
