"""Programs that are no MCP servers, and a look at what is left of a process."""

import contextlib
import os

import psutil

NO_SERVERS = {
    "exits": "pass",
    "writes junk for ever": "while True: print('x' * 65536)",
    "writes one endless line": "import sys\nwhile True: sys.stdout.write('x' * 65536)",
    "writes bytes": "import os, time\nos.write(1, bytes(range(256))); time.sleep(1000)",
    "says nothing": "import time; time.sleep(1000)",
}


def processes_of_session(group: int) -> list[int]:
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) == group:
                found.append(pid)
    return found
