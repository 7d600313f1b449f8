"""A prefill, a decode and a router as processes of ours: up when all of them serve, down when the block is left."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sglang_pd.launch.plan import ROLES, Deployment, merge, write_document
from sglang_pd.launch.processes import Group, Say

START_S: Final = 120.0
"""How long a worker may take to load its model and open its transport."""


@dataclass(frozen=True)
class Stack:
    """What runs. url: the router's. sockets: admin socket of each worker."""

    group: Group
    url: str
    workers: Mapping[str, dict[str, Any]]
    sockets: Mapping[str, str]


@contextlib.contextmanager
def running(deployment: Deployment, say: Say, environ: Mapping[str, str] | None = None) -> Iterator[Stack]:
    """Start everything, workers first. Raises `ConfigError` with the last words of a process that ends."""
    drain_s = max(config.liveness.drain_s for config in deployment.configs.values())
    with tempfile.TemporaryDirectory(prefix="sglang-pd-") as folder, Group(say, stop_s=drain_s + 15) as group:
        sockets = {}
        for role in ROLES:
            config = deployment.configs[role]
            sockets[role] = config.observe.admin_socket or f"{folder}/{role}.sock"
            document = merge(deployment.documents[role], {"observe": {"admin_socket": sockets[role]}})
            arguments = write_document(folder, role, document, deployment.sets[role])
            group.start(role, [*arguments, "--json"], environ)
        group.wait_ready(START_S)
        workers = {role: group.processes[role].announced for role in ROLES}
        document = deployment.router_document(workers["prefill"], workers["decode"])
        arguments = write_document(folder, "router", document, deployment.sets["router"])
        group.start("router", [*arguments, "--json"], environ)
        group.wait_ready(START_S)
        yield Stack(group, str(group.processes["router"].announced["url"]), workers, sockets)
