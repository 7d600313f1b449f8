"""A worker as a process that is ours from the start: environment, logs, server, drain."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from sglang_pd.config import WorkerConfig, apply_environment, backend_settings, cautions
from sglang_pd.config.address import Address
from sglang_pd.observe import configure_logging
from sglang_pd.server.serve import listen, serve
from sglang_pd.worker.serving.service import WorkerService
from sglang_pd.worker.wakeups import prefer_latency

log = logging.getLogger("sglang_pd.launch")

READY: Final = "ready"
CLOSE_S: Final = 20.0
"""How long threads, sockets and the transport may take to close, once everything is drained."""


def run_worker(config: WorkerConfig) -> None:
    """Be a worker until SIGTERM or SIGINT, then drain. For a process that is ours from the start: sets what the
    transport's library reads from the environment.

    Prints one line of JSON on standard output once it serves, with the addresses in force. Raises what `WorkerService`
    raises, and `ConfigError` for a port that is taken.
    """
    prefer_latency()
    configure_logging(config.log_level)
    apply_environment(backend_settings(config), os.environ)
    for caution in cautions(config):
        log.warning("%s", caution)
    listener = listen(config.http_address)
    with listener:
        service = WorkerService(config)
        http = Address(config.advertised_host, listener.getsockname()[1])
        gc.collect()
        gc.freeze()  # some 10^5 objects of the model's library, which every full collection would walk for nothing
        try:
            serve(service, listener, on_ready=lambda: announce(facts(service, http)))
        finally:
            with ends_within(CLOSE_S):
                service.close()


@contextlib.contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    """What is done in the block has so long; then this process ends without it, for it has nothing else to do."""

    def end() -> None:
        log.error("closing took longer than %g s; the process ends without it", seconds)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def facts(service: WorkerService, http: Address) -> dict[str, Any]:
    """What a worker announces once it serves."""
    return {
        "event": READY,
        "role": service.role.value,
        "instance": service.name,
        "url": http.url(),
        "bootstrap_port": service.bootstrap_port,
        "backend": service.config.backend.name,
        "engine": service.config.engine.name,
        "pid": os.getpid(),
    }


def announce(line: dict[str, Any]) -> None:
    """One line of JSON on standard output, at once."""
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()
