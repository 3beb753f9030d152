"""Whether other processes answer on the same port, so that a scrape reaches one of several."""

import os
import re
from pathlib import Path

_SERVERS = re.compile(rb"gunicorn|uvicorn|hypercorn|granian")

_NOT_WORKERS = b"resource_tracker"
"""In the command of a process of Python's own, which has the same parent."""


def is_one_of_several() -> bool:
    """Whether this is a worker of a server with several."""
    try:
        # Other systems than Linux do not say.
        parent = Path(f"/proc/{os.getppid()}")
        if not _SERVERS.search((parent / "cmdline").read_bytes()):
            return False
        children = (parent / "task" / parent.name / "children").read_text().split()
        commands = [Path(f"/proc/{each}/cmdline").read_bytes() for each in children]
    except OSError:
        return False
    return sum(_NOT_WORKERS not in each for each in commands) > 1
