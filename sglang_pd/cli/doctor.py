"""`sglang-pd doctor`: can a worker run on this machine?"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from typing import Annotated

import typer

from sglang_pd.backends.registry import BACKENDS
from sglang_pd.cli import machine
from sglang_pd.cli.app import EXIT_NO
from sglang_pd.cli.machine import Finding
from sglang_pd.cli.output import FileArgument, JsonOption, SetOption, emit, emit_json, one_file, table
from sglang_pd.cli.probe import probe_backend
from sglang_pd.config import WorkerConfig, apply_environment, backend_settings, cautions, load_worker
from sglang_pd.config.network import BackendSettings
from sglang_pd.protocol.errors import ConfigError, PdError
from sglang_pd.worker.serving.instances import Planned, plan_instance
from sglang_pd.worker.serving.service import on_own_device, prepare

COLUMNS = ("", "area", "what", "found", "expected", "do")
MEMORY_HINT = "How much it is: pools.memory_bytes, pools.tokens, pools.rows; see `sglang-pd explain`."
SIGNS = {"ok": "ok", "info": "-", "warn": "WARN", "bad": "BAD"}

ConfigOption = Annotated[str, typer.Option("--config", metavar="FILE", help="The worker that is to run here.")]
ProbeOption = Annotated[bool, typer.Option("--probe/--no-probe", help="Create backends in child processes.")]


def command(
    file: FileArgument = "",
    config: ConfigOption = "",
    probe: ProbeOption = True,
    sets: SetOption = [],  # noqa: B006
    as_json: JsonOption = False,
) -> int:
    """This machine: libraries and their versions, devices, ports, limits, settings in force. Exit code 1 when a worker
    (of the configuration, if one is given) cannot run here."""
    config = one_file(config, file)
    if sets and not config:
        raise ConfigError(
            "overrides need a configuration", where="--set", expected="--config FILE", actual=sets[0][:80]
        )
    worker = load_worker(config, sets=sets) if config else None
    findings = list(examine(worker, probe=probe))
    healthy = all(finding.level != "bad" for finding in findings)
    if as_json:
        emit_json({"healthy": healthy, "findings": findings})
    else:
        rows = [[SIGNS[f.level], f.area, f.name, f.found, f.expected, f.hint] for f in findings]
        emit(table("this machine", COLUMNS, rows), "", "healthy" if healthy else "a worker cannot run here: see BAD")
    return 0 if healthy else EXIT_NO


def examine(worker: WorkerConfig | None, *, probe: bool) -> Iterator[Finding]:
    """All findings. Without a configuration no backend is required, and all are tried."""
    extras: frozenset[str] = frozenset()
    if worker is not None:
        extras = _extras(worker)
    yield from machine.system()
    yield from machine.libraries(extras)
    yield from machine.devices(needs_gpu=worker is not None and worker.pools.device != "cpu")
    yield from machine.limits()
    yield from machine.settings(os.environ)
    if worker is not None:
        yield from machine.ports(worker)
        yield from machine.keys(worker)
        yield from (Finding(area="security", name="caution", level="warn", found=text) for text in cautions(worker))
        yield from _environment(backend_settings(worker))
        refused, planned = yield from _start(worker)
        if probe and not refused:  # a library without its device says what points elsewhere
            yield _backend(backend_settings(worker), required=True, planned=planned)
        return
    if not probe:
        return
    for name in BACKENDS:
        data = {"role": "prefill", "backend": {"name": name}, "security": {"insecure_data_plane": True}}
        yield _backend(backend_settings(load_worker(data)), required=False)


def _extras(worker: WorkerConfig) -> frozenset[str]:
    """Extras of the package without which this worker cannot start."""
    found = {"server", worker.engine.name}
    if worker.backend.name != "mooncake":  # two builds, either will do: the probe tells
        found.add(worker.backend.name)
    return frozenset(found | ({"cuda"} if worker.pools.device != "cpu" else set()))


def _start(worker: WorkerConfig) -> Generator[Finding, None, tuple[bool, Planned | None]]:
    """What a worker checks before it makes anything: whether it refuses, and its memory, where it could be planned."""
    refused = False
    try:
        # The environment is judged apart: here it is as the command line makes it.
        prepare(worker, {**os.environ, **backend_settings(worker).environment})
    except PdError as error:
        refused = True
        yield _refused(error)
    try:
        planned = plan_instance(on_own_device(worker))
    except PdError as error:
        yield _refused(error)
        return refused, None
    used = ", ".join(f"{nbytes:,} bytes on {device}" for device, nbytes in sorted(planned.budget.used_bytes.items()))
    yield Finding(area="start", name="pools", level="info", found=used)
    return refused, planned


def _refused(error: PdError) -> Finding:
    return Finding(
        area="start",
        name=error.where,
        level="bad",
        found=f"[{error.code}] {error.message}" + (f" (got {error.actual})" if error.actual != "" else ""),
        expected=str(error.expected),
        hint=error.hint,
    )


def _environment(settings: BackendSettings) -> Iterator[Finding]:
    environ = dict(os.environ)
    try:
        apply_environment(settings, environ)
    except PdError as error:
        yield Finding(
            area="environment",
            name=error.where,
            level="bad",
            found=str(error.actual),
            expected=str(error.expected),
            hint=error.hint,
        )
        return
    for name in sorted({*settings.environment, *settings.defaults}):
        said = environ[name] + ("" if name in os.environ else " (set by the command line)")
        yield Finding(area="environment", name=name, level="info", found=said)


def _backend(settings: BackendSettings, *, required: bool, planned: Planned | None = None) -> Finding:
    """Whether the backend starts, and can have the memory that the worker will ask it for."""
    pieces = [(segment.nbytes, segment.device) for segment in planned.layouts[0].segments] if planned else []
    answer = probe_backend(settings, os.environ, pieces)
    if answer.error is not None:
        e = answer.error
        found = f"[{e.code}] {e.where}: {e.message}" + (f" (got {e.actual})" if e.actual else "")
        return Finding(
            area="backend",
            name=settings.name,
            level="bad" if required else "info",
            found=found,
            expected=e.expected,
            hint=e.hint or (MEMORY_HINT if e.code == "memory_refused" else ""),
        )
    can = answer.capabilities
    memory = "host and device memory" if can is not None and can.device_memory else "host memory"
    return Finding(area="backend", name=settings.name, level="ok", found=f"starts here, {memory}")
