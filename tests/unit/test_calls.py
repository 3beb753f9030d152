"""Calls are counted of what a function does, and of nothing that happens to it meanwhile."""

import gc

import pytest

from tests.calls import calls_made


@pytest.mark.parametrize("enabled", [True, False])
def test_a_collection_of_garbage_is_not_counted(
    enabled: bool,  # noqa: FBT001 - pytest's argument
) -> None:
    """However much garbage a function leaves, no callback of the collector counts as its call."""
    collections: list[str] = []
    during: list[str] = []

    def collected(phase: str, _info: dict[str, int]) -> None:
        collections.append(phase)

    def leave_garbage() -> None:
        collections.clear()
        for _ in range(100_000):
            kept: list[object] = []
            kept += [kept]
        # What is collected later is not the function's, either.
        during.extend(collections)

    gc.callbacks.append(collected)
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        made = calls_made(leave_garbage)
        assert gc.isenabled() is enabled
    finally:
        gc.callbacks.remove(collected)
        (gc.enable if was else gc.disable)()
    assert during == []
    # The function, its two calls of lists' methods, and what ends the counting.
    assert made <= 5
