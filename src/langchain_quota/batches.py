"""The hits of a batch of calls."""

from collections.abc import Sequence

from langchain_quota.admission import Hits
from langchain_quota.decision import Call
from langchain_quota.resolved import Asked


def hits_of(calls: Sequence[Call], asked: Sequence[Asked]) -> tuple[list[Hits], list[int]]:
    """What the calls would add to counts, and for each call the index of its hits."""
    # Calls that share an id are one call to the agent: they ask together.
    hits: list[Hits] = []
    index_of: list[int] = []
    by_id: dict[str, int] = {}
    for call, (_, one, _) in zip(calls, asked, strict=True):
        index = len(hits) if call.id is None else by_id.setdefault(call.id, len(hits))
        index_of.append(index)
        added = one
        if call.amount != 1:
            added = Hits(dict.fromkeys(one.amounts, call.amount), one.thresholds)
        if index == len(hits):
            hits.append(added)
            continue
        amounts = dict(hits[index].amounts)
        for count, amount in added.amounts.items():
            amounts[count] = amounts.get(count, 0) + amount
        thresholds = dict.fromkeys((*hits[index].thresholds, *added.thresholds))
        hits[index] = Hits(amounts, tuple(thresholds))
    return hits, index_of
