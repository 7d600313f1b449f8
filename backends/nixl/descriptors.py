"""Whether the library finds the descriptors that it needs: where they are short it may end the process, or hang."""

from __future__ import annotations

import os
import resource

from sglang_pd.backends.shortage import no_descriptor
from sglang_pd.protocol.errors import BackendUnavailable

AGENT_DESCRIPTORS = 64
"""Descriptors that must be free before an agent is built.

Measured (nixl 1.5.1, UCX 1.23, no RDMA device): one takes 11 to 18, and needs 16 to be built. With less than that UCX
fails; with less than 6 it ended the process, and in a process with peers its own error path waited for ever. The rest
is for devices that were not measured, and for what other threads open meanwhile.
"""


def check_free(count: int, where: str) -> None:
    """Raise `BackendUnavailable` unless `count` descriptors are free under RLIMIT_NOFILE."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return
    try:
        names = os.listdir("/proc/self/fd")
    except FileNotFoundError:
        return  # without /proc nothing is known
    except OSError as error:
        raise no_descriptor(error, where) from error
    # One of them was the listing's own; numbers beyond a limit that was lowered since take nothing from it.
    free = limit - (sum(int(name) < limit for name in names) - 1)
    if free < count:
        raise BackendUnavailable(
            "too few descriptors are free for the library's agent",
            where=where,
            expected=f"{count} free",
            actual=f"{free} free under RLIMIT_NOFILE = {limit}",
            hint="Raise the limit of open files (ulimit -n; `sglang-pd doctor` shows it).",
        )
