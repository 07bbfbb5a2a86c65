"""Environment of a process that has one device, as a user's has."""

import os
import re


def one_device() -> dict[str, str]:
    """Return this process's environment without simulated devices.

    The other flags stay, so that the process compiles as cheaply as the tests do.
    """
    count = r"--xla_force_host_platform_device_count=\d+"
    return os.environ | {"XLA_FLAGS": re.sub(count, "", os.environ.get("XLA_FLAGS", ""))}
