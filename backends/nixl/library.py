"""The one place that calls the `nixl` package. Its exceptions end here, as errors of ours.

How an exception of the library is judged (it raises where its documentation says that it returns "ERR"):

| of the library | code | meaning for a transfer |
|---|---|---|
| RemoteDisconnect | `peer_lost` | the connection is gone; not that nothing more lands |
| NotFound | `segment_invalid` | stale peer, or memory that is not registered |
| InvalidParam, Mismatch, NotAllowed, RepostActive, NotPosted | `internal` | a defect of ours |
| everything else, the state "ERR" included | `transfer_unknown` | the library cannot say |
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglang_pd.backends.library.blob import SegmentEntry
from sglang_pd.backends.library.ports import start_elsewhere
from sglang_pd.backends.nixl.descriptors import AGENT_DESCRIPTORS, check_free
from sglang_pd.backends.nixl.options import NixlOptions, ucx_settings
from sglang_pd.backends.nixl.reach import Listens, listening, stated
from sglang_pd.protocol.errors import BackendError, BackendUnavailable, TransferError

log = logging.getLogger("sglang_pd.backends.nixl")

TESTED_SERIES = "1.5"
PIP = "pip install 'sglang-pd[nixl]'"

Rows = NDArray[np.uint64] | list[tuple[int, int, int]]
"""Descriptors as the library takes them: address, length in bytes, device number; an array has shape [rows, 3]."""

_KINDS = {"cpu": "DRAM", "cuda": "VRAM"}
_CODES = {
    "nixlRemoteDisconnectError": "peer_lost",
    "nixlNotFoundError": "segment_invalid",
    "nixlInvalidParamError": "internal",
    "nixlMismatchError": "internal",
    "nixlNotAllowedError": "internal",
    "nixlRepostActiveError": "internal",
    "nixlNotPostedError": "internal",
}


@dataclass(frozen=True, slots=True)
class Library:
    """The imported package. `package` is the build in use (`nixl_cu13`), `version` that build's version."""

    api: Any
    package: str
    version: str


def load_library(options: NixlOptions) -> Library:
    """Import `nixl`. Raises `BackendUnavailable` naming the package that is missing and the command that gets it."""
    try:
        api = _import_api()
    except ImportError as error:
        missing = getattr(error, "name", None) or "nixl"
        raise BackendUnavailable(
            "the nixl package does not import",
            where=f"import of {missing}",
            expected=f"nixl {TESTED_SERIES}.x",
            actual=str(error),
            hint=f"{PIP}; its builds nixl-cu12 and nixl-cu13 must have the version of nixl and match torch's CUDA.",
        ) from error
    package = str(api.__name__).partition(".")[0]
    version = _version(package)
    if ".".join(version.split(".")[:2]) != TESTED_SERIES:
        if not options.allow_untested_version:
            raise BackendUnavailable(
                "this nixl was never tested here",
                where=f"package {package}",
                expected=f"{TESTED_SERIES}.x",
                actual=version,
                hint=f"{PIP}, or set $.backend.options.allow_untested_version to true.",
            )
        log.warning("nixl %s was never tested; %s.x was", version, TESTED_SERIES)
    if "NIXL_LOG_LEVEL" not in os.environ:
        # The package prints progress messages on standard output, where a program's own results go.
        logging.getLogger("nixl").setLevel(logging.WARNING)
    return Library(api, package, version)


def _import_api() -> Any:
    """`nixl._api`. Importing `nixl` imports the whole of a torch without CUDA (seconds) to learn that it has none; then
    the build is chosen here, in the same order."""
    if "torch" not in sys.modules and _torch_without_cuda():
        for package in ("nixl_cu13", "nixl_cu12"):
            if importlib.util.find_spec(package) is not None:
                return importlib.import_module(f"{package}._api")
    importlib.import_module("nixl")
    return importlib.import_module("nixl._api")


def _torch_without_cuda() -> bool:
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return importlib.metadata.version("nixl")


def translate(error: Exception, doing: str, peer: str = "") -> TransferError:
    """The library's exception as ours. It keeps words only: a traceback would keep the library's agent alive."""
    name = type(error).__name__
    return TransferError(
        f"nixl: {name}: {error}",
        code=_CODES.get(name, "transfer_unknown"),
        where=f"{doing}, peer {peer}" if peer else doing,
        backend="nixl",
    )


def _call(doing: str, peer: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the library. Raises `TransferError` with its words inside, and with none of its objects."""
    try:
        return function(*arguments)
    except Exception as error:
        failure = translate(error, doing, peer)
    # This frame stays in the raised error's traceback.
    del function, arguments
    raise failure


class Handle:
    """A posted piece of a transfer. `finished`: the library says DONE, or has raised for it."""

    __slots__ = ("failed", "finished", "raw")

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.finished = False
        self.failed: TransferError | None = None


class Agent:
    """One agent of the library. One thread at a time may call it: whoever holds the engine's lock.

    Raises `BackendUnavailable` where the plugin does not start, or too few descriptors are free to try.
    """

    def __init__(self, library: Library, name: str, options: NixlOptions) -> None:
        self.name = name
        self._plugin = options.plugin
        self._stuck: list[Handle] = []
        check_free(AGENT_DESCRIPTORS, f"creating the agent {name}")
        before = listening()
        config = library.api.nixl_agent_config(enable_prog_thread=options.progress_thread, backends=[])
        self._agent = _call("creating the agent", "", library.api.nixl_agent, name, config)
        self._inner = weakref.ref(self._agent.agent)
        plugins = self._agent.get_plugin_list()
        failure = None
        if options.plugin not in plugins:
            failure = f"plugins: {', '.join(plugins)}"
        else:
            try:
                self._agent.create_backend(options.plugin, options.backend_params())
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
        if failure is not None:
            self._agent = None
            raise _unavailable(options, library, failure)
        # What else this process began to listen on meanwhile does no harm: one address that answers is enough, and a
        # port more is only kept longer.
        after = listening()
        self.listens = stated(before, after)
        self.ports = frozenset(port for inode, (_, port) in after.items() if inode not in before)

    def register(self, segments: Sequence[SegmentEntry]) -> list[Any]:
        """Register the segments; returns what `deregister` takes. Raises `BackendError` (`memory_refused`)."""
        made: list[Any] = []
        for entry in segments:
            kind, _, index = entry.device.partition(":")
            rows = [(entry.address, entry.nbytes, int(index or 0), "")]
            try:
                made.append(self._agent.register_memory(rows, _KINDS[kind], [self._plugin]))
                continue
            except Exception as error:
                words = f"{type(error).__name__}: {error}"
            for done in made:
                self.deregister(done)
            raise BackendError(
                "the library does not register this memory",
                code="memory_refused",
                where=f"{entry.nbytes} bytes at {entry.address:#x} on {entry.device}",
                actual=words,
                backend="nixl",
            )
        return made

    def deregister(self, registered: Any) -> None:
        """Undo one registration. It revokes nothing: a peer with old metadata can still write."""
        _call("deregistering memory", "", self._agent.deregister_memory, registered, [self._plugin])

    def metadata(self) -> bytes:
        """What peers load."""
        return bytes(_call("reading the agent's metadata", "", self._agent.get_agent_metadata))

    def add_peer(self, metadata: bytes, name: str) -> None:
        """Load a peer and start wiring up."""
        loaded = _call("connecting", name, self._agent.add_remote_agent, metadata)
        found = loaded.decode() if isinstance(loaded, bytes) else str(loaded)
        if found != name:
            self.remove_peer(found)
            raise BackendError(
                "the metadata is of another agent",
                code="message_malformed",
                expected=name,
                actual=found,
                backend="nixl",
            )
        _call("connecting", name, self._agent.make_connection, name, [self._plugin])

    def remove_peer(self, name: str) -> None:
        """Disconnect and forget a peer. Only once none of its handles is in progress."""
        _call("disconnecting", name, self._agent.remove_remote_agent, name)

    def notify(self, name: str, message: bytes) -> None:
        """Send a wake-up. Nothing may depend on its arrival or its order."""
        _call("notifying", name, self._agent.send_notif, name, message)

    def notifications(self) -> Mapping[str, list[bytes]]:
        """What arrived since the last call. Advances the library."""
        found: Mapping[str, list[bytes]] = _call("reading notifications", "", self._agent.get_new_notifs)
        return found

    def prepare(self, rows: tuple[Rows, Rows], kinds: tuple[str, str], name: str) -> Handle:
        """A write of local rows to remote rows, not yet posted. `kinds`: `cpu` or `cuda`, each side."""
        return Handle(_call("preparing a transfer", name, self._initialize, rows, kinds, name))

    def _initialize(self, rows: tuple[Rows, Rows], kinds: tuple[str, str], name: str) -> Any:
        local = self._agent.get_xfer_descs(rows[0], _KINDS[kinds[0]])
        remote = self._agent.get_xfer_descs(rows[1], _KINDS[kinds[1]])
        return self._agent.initialize_xfer("WRITE", local, remote, name)

    def post(self, handle: Handle, name: str) -> None:
        """Hand the piece to the transport. May copy before it returns. Sets `finished` and `failed`; never raises."""
        _advance(self._agent.transfer, handle, "posting a transfer", name)

    def check(self, handle: Handle, name: str) -> None:
        """Ask for the state of a posted piece, advancing the library. Sets `finished` and `failed`; never raises."""
        _advance(self._agent.check_xfer_state, handle, "a transfer in flight", name)

    def release(self, handle: Handle) -> None:
        """Free a finished handle; one that the library will not let go of is tried again with the next."""
        waiting, self._stuck = [handle, *self._stuck], []
        for one in waiting:
            try:
                one.raw.release()
            except Exception as error:
                if one is handle:
                    log.warning("nixl keeps a finished transfer: %s: %s", type(error).__name__, error)
                self._stuck.append(one)

    def destroy(self, handles: Sequence[Handle]) -> bool:
        """Close the agent, whose unfinished `handles` are given up. True when the library has really destroyed it.

        Its destructor closes every connection and joins its threads, so nothing that came over a socket can be stored
        afterwards. May be called again.
        """
        for handle in [*handles, *self._stuck]:
            if handle.raw is not None:
                # Releasing is no cancel, and the finaliser must not try it on an agent that is gone.
                handle.raw._released = True
                handle.raw = None
        self._stuck = []
        self._agent = None
        return self.destroyed

    @property
    def destroyed(self) -> bool:
        """Whether the library has destroyed it. From any thread."""
        return self._inner() is None


def build(library: Library, name: str, options: NixlOptions) -> Agent:
    """An agent that listens on no port at which peers of a former one may still write. Raises `BackendUnavailable`."""
    return start_elsewhere(
        lambda: Agent(library, name, options),
        lambda agent: agent.ports,
        lambda agent: agent.destroy(()),
    )


class Described(NamedTuple):
    """What peers need to know of an agent: its name, the library's metadata, and where it listens."""

    name: str
    metadata: bytes
    listens: list[Listens]

    @classmethod
    def of(cls, agent: Agent) -> Described:
        """The agent as it is now."""
        return cls(agent.name, agent.metadata(), agent.listens)


def _advance(call: Callable[[Any], str], handle: Handle, doing: str, name: str) -> None:
    try:
        state = call(handle.raw)
    except Exception as error:
        handle.failed, handle.finished = translate(error, doing, name), True
        return
    if state == "DONE":
        handle.finished = True
    elif state != "PROC":
        handle.finished = True
        handle.failed = TransferError(
            f"nixl: state {state}", code="transfer_unknown", where=f"{doing}, peer {name}", backend="nixl"
        )


def _unavailable(options: NixlOptions, library: Library, words: str) -> BackendUnavailable:
    missing = missing_library(library, options.plugin)
    settings = ", ".join(f"{name}={value}" for name, value in ucx_settings().items())
    return BackendUnavailable(
        f"nixl cannot start its {options.plugin} plugin",
        where=f"{library.package} {library.version}",
        expected=f"the {options.plugin} plugin and every library that it links",
        actual=f"{missing} is missing" if missing else words,
        hint="Install the operating system's package that has this file." if missing else PIP,
        settings=settings or "none",
    )


def missing_library(library: Library, plugin: str) -> str:
    """File name of the shared library for want of which a plugin does not load, or an empty text."""
    folder = Path(library.api.__file__).resolve().parent.parent / f"{library.package}.libs" / "nixl"
    path = folder / f"libplugin_{plugin}.so"
    if not path.is_file():
        return path.name
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        return str(error).partition(":")[0]
    return ""
