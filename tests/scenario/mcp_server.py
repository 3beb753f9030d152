"""An MCP server over stdio, for the tests: it notes each call in the file that it is given."""

import asyncio
import sys
from pathlib import Path

from mcp.server.fastmcp import FastMCP

server = FastMCP("tools")
calls = Path(sys.argv[1])
together = asyncio.Barrier(2)

MEETING = 30
"""The seconds within which two calls meet; only a failure waits so long."""


def note(name: str) -> None:
    with calls.open("a") as file:
        file.write(f"{name}\n")


@server.tool()
async def search(query: str = "") -> str:
    """Search; answers when two searches run at once."""
    note("search")
    async with asyncio.timeout(MEETING):
        await together.wait()
    return "found"


@server.tool()
async def calc(term: str = "") -> int:
    """Calculate."""
    note("calc")
    return 42


@server.tool()
async def fail() -> str:
    """Fail."""
    note("fail")
    raise ValueError("no")


if __name__ == "__main__":
    server.run("stdio")
