"""The harness's side: child processes, pairs of them, and the facts a case needs about the backend under test."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import numpy as np

from sglang_pd.protocol.batch import WriteBatch
from sglang_pd.protocol.errors import ErrorInfo
from sglang_pd.testing.pattern import CANARY, Bytes, batch_to_wire
from sglang_pd.testing.wire import Channel, ChannelClosed, ChannelTimeout

MIB = 1 << 20
DEFAULT_SIZES = (4 * MIB, 3 * MIB + 4096, MIB)
"""Segments of each process, in bytes, unless a case asks for others."""

ANSWER_WITHIN_S = 60.0
"""Longest any command may take beyond the time it was given."""


class ConformanceFailure(AssertionError):
    """A backend broke the contract; the text says which sentence."""


class CaseSkipped(Exception):
    """A case does not apply to what the backend declares; the text says why."""


class BackendSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The backend under test and how its processes are made.

    name: as in `sglang_pd.backends.registry`; with `module`, a module that defines `create`, registered first.
    options: the backend's own; `restart_options` are laid over them where a case restarts a peer at its address.
    env, python_path: laid over the child processes' environment and module path.
    src_device, dst_device: where the segments of writers and of destinations lie.
    """

    name: str
    module: str = ""
    options: dict[str, Any] = {}
    restart_options: dict[str, Any] = {}
    env: dict[str, str] = {}
    python_path: tuple[str, ...] = ()
    src_device: str = "cpu"
    dst_device: str = "cpu"


class RemoteRefusal(Exception):
    """A child's backend raised a `PdError`."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(str(info))
        self.info = info


class ChildProcess:
    """One spawned process with a backend in it."""

    def __init__(self, spec: BackendSpec, side: socket.socket, options: Mapping[str, Any]) -> None:
        self.spec = spec
        self.options = dict(options)
        self.epoch = secrets.randbits(64) | 1
        self.sizes: tuple[int, ...] = ()
        self.capabilities: dict[str, Any] = {}
        mine, theirs = socket.socketpair()
        self._stderr = tempfile.TemporaryFile()
        env = {**os.environ, **spec.env}
        path = [*spec.python_path, *filter(None, [env.get("PYTHONPATH", "")])]
        if path:
            env["PYTHONPATH"] = os.pathsep.join(path)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sglang_pd.testing.child", str(theirs.fileno()), str(side.fileno())],
            pass_fds=(theirs.fileno(), side.fileno()),
            stdin=subprocess.DEVNULL,
            stdout=self._stderr,
            stderr=self._stderr,
            env=env,
        )
        theirs.close()
        side.close()
        self._channel = Channel(mine)

    def start(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Send a command without waiting for its answer."""
        try:
            self._channel.send((name, dict(arguments)))
        except ChannelClosed as error:
            raise ConformanceFailure(f"{name}: the process is gone ({error}); {self.words()}") from error

    def answer(self, name: str, within_s: float = ANSWER_WITHIN_S) -> Any:
        """The answer to the command last sent. Raises `RemoteRefusal` for a `PdError` of the child's."""
        try:
            reply = self._channel.receive(within_s)
        except ChannelTimeout as error:
            raise ConformanceFailure(f"{name} did not return within {within_s:.0f} s; {self.words()}") from error
        except ChannelClosed as error:
            raise ConformanceFailure(f"{name} ended the process; {self.words()}") from error
        if "crash" in reply:
            raise ConformanceFailure(f"{name} raised what is no PdError:\n{reply['crash']}")
        if "error" in reply:
            raise RemoteRefusal(msgspec.convert(reply["error"], ErrorInfo))
        return reply["value"]

    def call(self, name: str, **arguments: Any) -> Any:
        """One command and its answer."""
        self.start(name, arguments)
        extra = float(arguments.get("within_s", 0.0)) + float(arguments.get("for_s", 0.0))
        return self.answer(name, ANSWER_WITHIN_S + extra)

    def refused(self, name: str, **arguments: Any) -> ErrorInfo:
        """The error of a command that must be refused with a `PdError`."""
        try:
            value = self.call(name, **arguments)
        except RemoteRefusal as refusal:
            return refusal.info
        raise ConformanceFailure(f"{name} was accepted where it must be refused (it returned {value!r})")

    def words(self) -> str:
        """What the process wrote to its standard streams, last 2,000 bytes, and its exit status."""
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - 2000))
        text = self._stderr.read().decode(errors="replace").strip()
        return f"exit status {self.process.poll()}, said: {text or '(nothing)'}"

    def kill(self) -> None:
        """`kill -9`, and wait until it is gone."""
        self.process.kill()
        self.process.wait(30)

    def stop(self) -> None:
        """SIGSTOP."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """End the process, by `kill -9` if it does not do so when told. Idempotent."""
        try:
            self._channel.send(("exit", {}))
            self.process.wait(5)
        except (ChannelClosed, subprocess.TimeoutExpired):
            self.process.kill()
        self.process.wait(30)
        self._channel.close()
        self._stderr.close()


@dataclass(frozen=True)
class Link:
    """A connection from one child to another, as the writer sees it."""

    writer: ChildProcess
    target: ChildProcess
    peer: int
    transport: str

    def post(self, batch: WriteBatch, deadline_s: float = 30.0) -> dict[str, Any]:
        """Post a batch: `transfer`, `write_s`, `nbytes`."""
        wire = batch_to_wire(batch)
        return cast(dict[str, Any], self.writer.call("write", peer=self.peer, batch=wire, deadline_s=deadline_s))

    def wait(self, transfer: int, within_s: float = 35.0, settle: bool = False) -> dict[str, Any]:
        """How a transfer ended: `state`, `quiesced`, `error`, `took_s`."""
        return cast(dict[str, Any], self.writer.call("wait", transfer=transfer, within_s=within_s, settle=settle))

    def move(self, batch: WriteBatch) -> dict[str, Any]:
        """Post and demand DONE; what `post` and `wait` said."""
        posted = self.post(batch)
        ended = self.wait(posted["transfer"])
        require(ended["state"] == "done", f"a write to a live peer ended {ended['state']}: {ended['error']}")
        require(ended["quiesced"] is True, "a DONE transfer is not quiesced")
        return {**posted, **ended}

    def fence(self, within_s: float) -> dict[str, Any]:
        """Ask for the writer's proof: `proven`, `took_s`."""
        return cast(dict[str, Any], self.writer.call("fence", peer=self.peer, within_s=within_s))


def require(condition: bool, sentence: str) -> None:
    """Raise `ConformanceFailure` with `sentence` unless `condition`."""
    if not condition:
        raise ConformanceFailure(sentence)


@dataclass
class Lab:
    """Makes processes and connects them; what `close` has not seen ended, it ends."""

    spec: BackendSpec
    children: list[ChildProcess] = field(default_factory=list)
    _shared: Link | None = None

    def spawn(
        self, sizes: Sequence[int] = DEFAULT_SIZES, *, device: str = "cpu", options: Mapping[str, Any] | None = None
    ) -> ChildProcess:
        """A process with a backend and registered segments."""
        return self.spawn_many([(sizes, device)], options=options)[0]

    def spawn_many(
        self, wanted: Sequence[tuple[Sequence[int], str]], *, options: Mapping[str, Any] | None = None
    ) -> list[ChildProcess]:
        """Processes started at once; neighbours share a side channel."""
        ends: list[socket.socket] = []
        while len(ends) < len(wanted):
            ends += socket.socketpair()
        settings = {**self.spec.options, **(options or {})}
        made = [ChildProcess(self.spec, end, settings) for end in ends[: len(wanted)]]
        for end in ends[len(wanted) :]:
            end.close()
        self.children += made
        for child in made:
            names = {"name": self.spec.name, "module": self.spec.module, "options": settings, "epoch": child.epoch}
            child.start("create", names)
        for child in made:
            child.capabilities = child.answer("create")
        for child, (sizes, device) in zip(made, wanted, strict=True):
            child.start("register", {"wanted": [(size, device) for size in sizes]})
        for child, (sizes, _) in zip(made, wanted, strict=True):
            child.sizes = tuple(child.answer("register"))
            require(child.sizes == tuple(sizes), f"segments of {child.sizes} bytes where {tuple(sizes)} were asked for")
        return made

    def connect(self, writer: ChildProcess, target: ChildProcess) -> Link:
        """Connect `writer` to `target`, whose owner agrees with it first."""
        self.admit(writer, target)
        facts = writer.call("connect", blob=target.call("describe"), epoch=target.epoch)
        require(facts["epoch"] == target.epoch, "the peer's epoch is not the one connected to")
        require(tuple(facts["segment_bytes"]) == target.sizes, "the peer's segment table is not the registered one")
        return Link(writer, target, facts["peer"], facts["transport"])

    def admit(self, writer: ChildProcess, target: ChildProcess) -> None:
        """The owners agreed: the target hears of the writer as its worker would tell it."""
        target.call("admit", epoch=writer.epoch, blob=writer.call("describe"))

    def fresh(self, src_sizes: Sequence[int] = DEFAULT_SIZES, dst_sizes: Sequence[int] = DEFAULT_SIZES) -> Link:
        """A new connected pair for a case that breaks something."""
        wanted = [(src_sizes, self.spec.src_device), (dst_sizes, self.spec.dst_device)]
        writer, target = self.spawn_many(wanted)
        return self.connect(writer, target)

    def shared(self) -> Link:
        """The pair that cases share which leave it as it was."""
        if self._shared is None:
            self._shared = self.fresh()
        return self._shared

    def discard_shared(self) -> None:
        """End the shared pair, after a case failed on it."""
        if self._shared is not None:
            self.end(self._shared.writer, self._shared.target)
            self._shared = None

    def end(self, *children: ChildProcess) -> None:
        """End processes."""
        for child in children:
            child.end()
            self.children.remove(child)

    def end_private(self) -> None:
        """End every process but the shared pair's."""
        kept = (self._shared.writer, self._shared.target) if self._shared else ()
        self.end(*[child for child in self.children if child not in kept])

    def close(self) -> None:
        """End every process."""
        self._shared = None
        self.end(*list(self.children))


def load(child: ChildProcess, images: Sequence[Bytes]) -> None:
    """Store an image in each segment of a child."""
    for number, image in enumerate(images):
        child.call("store", segment=number, offset=0, data=image.tobytes())


def canaries(child: ChildProcess) -> None:
    """Fill every segment of a child with `CANARY`."""
    for number, size in enumerate(child.sizes):
        child.call("fill", segment=number, offset=0, nbytes=size, value=CANARY)


def compare(child: ChildProcess, images: Sequence[Bytes], what: str) -> None:
    """Demand that the child's segments hold exactly these images."""
    for number, image in enumerate(images):
        found = np.frombuffer(child.call("read", segment=number, offset=0, nbytes=image.nbytes), np.uint8)
        wrong = found != image
        if wrong.any():
            first = int(np.argmax(wrong))
            raise ConformanceFailure(
                f"{what}: {int(wrong.sum())} bytes of destination segment {number} are wrong, the first at offset "
                f"{first}: expected {image[first]:#04x}, found {found[first]:#04x} (canary {CANARY:#04x})"
            )
