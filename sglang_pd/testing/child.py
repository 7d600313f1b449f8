"""One process of the conformance harness: owns a backend, does what the harness says, ends in `os._exit`.

A process that created UCX dies with SIGSEGV in its exit handlers, so no child ever reaches the interpreter's exit.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from sglang_pd.backends.base import Backend, Peer, Segment, Transfer, TransferState
from sglang_pd.backends.registry import create_backend, register_backend
from sglang_pd.protocol.errors import ErrorInfo, PdError
from sglang_pd.testing import memory
from sglang_pd.testing.events import HostEvent, device_tensor, late_event
from sglang_pd.testing.pattern import batch_from_wire
from sglang_pd.testing.wire import Channel, ChannelClosed

FORK_WITHIN_S = 20
"""A fork that has not ended by then waits for threads that it does not have, and is killed."""

POLL_INTERVAL_S = 0.0002
"""Pause between two polls while a command waits for something."""


class Child:
    """The state of one process and its commands: every method without a leading underscore is one."""

    def __init__(self, side: Channel) -> None:
        self._side = side
        self._backend: Backend | None = None
        self._segments: tuple[Segment, ...] = ()
        self._peers: dict[int, Peer] = {}
        self._transfers: dict[int, Transfer] = {}
        self._events: dict[int, HostEvent] = {}
        self._next = 0

    # life

    def create(self, name: str, module: str, options: dict[str, Any], epoch: int) -> dict[str, Any]:
        """Build the backend; its capabilities."""
        if module:
            register_backend(name, module)
        self._backend = create_backend(name, epoch=epoch, options=options)
        found = self._backend.capabilities
        return {
            field: dict(value) if field == "verified_on" else value
            for field, value in ((f, getattr(found, f)) for f in found.__dataclass_fields__)
        }

    def register(self, wanted: list[tuple[int, str]]) -> list[int]:
        """Allocate and register segments of (bytes, device); their lengths."""
        made = [self._live.allocate(nbytes, device) for nbytes, device in wanted]
        self._segments = self._live.register(made)
        return [segment.nbytes for segment in self._segments]

    def describe(self) -> bytes:
        """The connect blob."""
        return self._live.describe()

    def connect(self, blob: bytes, epoch: int) -> dict[str, Any]:
        """Connect as a worker does; the peer's handle and facts."""
        connecting = self._live.start_connect(blob, epoch)
        while (peer := connecting.poll()) is None:
            self._live.progress()
            time.sleep(0.0005)
        self._next += 1
        self._peers[self._next] = peer
        facts = {"epoch": peer.epoch, "segment_bytes": list(peer.segment_bytes), "transport": peer.transport}
        return {"peer": self._next, **facts}

    def disconnect(self, peer: int) -> None:
        """Forget a peer, twice, as the contract allows."""
        self._live.disconnect(self._peers[peer])
        self._live.disconnect(self._peers[peer])

    def close(self) -> None:
        """Close the backend, twice, as the contract allows."""
        self._live.close()
        self._live.close()

    def lost(self, peer: int, within_s: float) -> ErrorInfo | None:
        """Why the peer is lost, waiting up to `within_s` seconds for it."""
        target = self._peers[peer]
        self._pump(lambda: target.lost is not None, within_s)
        return target.lost.info() if target.lost else None

    def fork(self, peer: int, batch: dict[str, bytes], threaded: bool) -> dict[str, Any]:
        """Fork with a transfer to `peer` posted (0: none). The fork tries every call, closes everything and drops it.

        Exit status of the fork and its words, the calls that it was not refused, the transfer's state there and here.
        """
        posted = self._live.write(self._peers[peer], batch_from_wire(batch)) if peer else None
        found: dict[str, Any] = {}

        def fork() -> None:
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                self._be_fork(write, peer, posted)
            os.close(write)
            with os.fdopen(read, "rb") as stream:
                words = stream.read().decode()
            found["status"] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            found["seen"], _, rest = words.partition("|")
            found["accepted"], _, found["words"] = rest.partition("|")

        thread = threading.Thread(target=fork)
        if threaded:
            thread.start()
            thread.join()
        else:
            fork()
        if posted is not None:
            self._pump(lambda: posted.poll() is not TransferState.PENDING, 30.0)
            found["state"] = posted.poll().value
        return found

    def _be_fork(self, write: int, peer: int, posted: Transfer | None) -> None:
        """The fork's whole life."""
        code = 1
        try:
            signal.alarm(FORK_WITHIN_S)
            seen = posted.poll().value if posted is not None else ""
            os.write(write, f"{seen}|{' '.join(self._accepted(peer))}|".encode())
            self.close()
            self._backend, self._segments = None, ()
            self._peers.clear()
            self._transfers.clear()
            gc.collect()
            code = 0
        except BaseException:
            os.write(write, traceback.format_exc().encode())
        finally:
            os._exit(code)

    def _accepted(self, peer: int) -> list[str]:
        """Calls of the backend that raise no `PdError`."""
        live = self._live
        calls: dict[str, Callable[[], object]] = {
            "allocate": lambda: live.allocate(4096),
            "describe": live.describe,
            "revoke": lambda: live.revoke(1),
            "admit": lambda: live.admit(1, live.describe()),
            "progress": live.progress,
            "wakeup_fd": live.wakeup_fd,
        }
        if peer:
            known = self._peers[peer]
            calls |= {"fence": lambda: live.fence(known), "disconnect": lambda: live.disconnect(known)}
        accepted = []
        for name, call in calls.items():
            try:
                call()
            except PdError:
                continue
            accepted.append(name)
        return accepted

    # memory

    def fill(self, segment: int, offset: int, nbytes: int, value: int) -> None:
        """Set bytes."""
        memory.fill(self._segments[segment], offset, nbytes, value)

    def store(self, segment: int, offset: int, data: bytes) -> None:
        """Store bytes."""
        memory.write_bytes(self._segments[segment], offset, np.frombuffer(data, np.uint8))

    def read(self, segment: int, offset: int, nbytes: int) -> bytes:
        """Bytes as they are now."""
        return memory.read_bytes(self._segments[segment], offset, nbytes).tobytes()

    def watch(self, segment: int, nbytes: int, value: int, for_s: float) -> int:
        """Offset of the first of `nbytes` bytes that stops being `value` within `for_s` seconds, or -1."""
        end = time.monotonic() + for_s
        while True:
            last = time.monotonic() >= end
            wrong = memory.read_bytes(self._segments[segment], 0, nbytes) != value
            if wrong.any():
                return int(np.argmax(wrong))
            if last:
                return -1
            self._live.progress()
            time.sleep(0.005)

    def adopt_foreign(self, nbytes: int) -> None:
        """Offer host memory that the backend did not allocate to `adopt`, and register what comes back."""
        self._live.register([self._live.adopt(_foreign(nbytes))])

    def adopt_tensor(self, nbytes: int, expandable: bool) -> int:
        """Adopt and register a torch tensor on segment 0's device, not at its allocation's start; its length."""
        tensor = device_tensor(nbytes, self._segments[0].device, expandable)
        offered = Segment(tensor.data_ptr(), nbytes, self._segments[0].device, tensor)
        self._segments += self._live.register([self._live.adopt(offered)])
        return self._segments[-1].nbytes

    def register_foreign(self, nbytes: int) -> None:
        """Offer host memory that the backend did not allocate to `register`, which must refuse it."""
        self._live.register([_foreign(nbytes)])

    def register_again(self) -> None:
        """Register the same segments a second time, which must be refused as overlap."""
        self._live.register(self._segments)

    # transfers

    def write(self, peer: int, batch: dict[str, bytes], deadline_s: float) -> dict[str, Any]:
        """Post; the transfer's handle and the seconds `write` took."""
        built = batch_from_wire(batch)
        began = time.perf_counter()
        transfer = self._live.write(self._peers[peer], built, deadline_s=deadline_s)
        took = time.perf_counter() - began
        self._next += 1
        self._transfers[self._next] = transfer
        return {"transfer": self._next, "write_s": took, "nbytes": transfer.nbytes}

    def write_after(self, peer: int, batch: dict[str, bytes], value: int, late_s: float) -> dict[str, Any]:
        """Post behind an event; `late_s` seconds later fill segment 0 with `value` and let the event happen."""
        built = batch_from_wire(batch)
        event = late_event(self._segments[0], value, late_s)
        began = time.perf_counter()
        transfer = self._live.write(self._peers[peer], built, after=event)
        took = time.perf_counter() - began
        early = transfer.poll().value
        self._pump(lambda: transfer.poll() is not TransferState.PENDING, late_s + 30.0)
        error = transfer.error
        return {
            "early": early,
            "state": transfer.poll().value,
            "error": error.info() if error else None,
            "write_s": took,
        }

    def write_held(self, peer: int, batch: dict[str, bytes], deadline_s: float) -> int:
        """Post behind an event that `happen` lets happen; the transfer's handle."""
        event = HostEvent()
        transfer = self._live.write(self._peers[peer], batch_from_wire(batch), after=event, deadline_s=deadline_s)
        self._next += 1
        self._transfers[self._next], self._events[self._next] = transfer, event
        return self._next

    def happen(self, transfer: int) -> None:
        """Let the event of a transfer of `write_held` happen."""
        self._events[transfer].set()

    def cancel(self, transfer: int) -> None:
        """Cancel a transfer, twice, as the contract allows."""
        self._transfers[transfer].cancel()
        self._transfers[transfer].cancel()

    def wait(self, transfer: int, within_s: float, settle: bool) -> dict[str, Any]:
        """State once it is not PENDING (`settle`: once it is final), or what it is after `within_s` seconds."""
        watched = self._transfers[transfer]
        pending = {TransferState.PENDING, TransferState.UNKNOWN} if settle else {TransferState.PENDING}
        began = time.monotonic()
        self._pump(lambda: watched.poll() not in pending, within_s)
        state = watched.poll()
        error = watched.error
        return {
            "state": state.value,
            "quiesced": watched.quiesced,
            "source_free": watched.source_free,
            "error": error.info() if error else None,
            "took_s": time.monotonic() - began,
        }

    def fence(self, peer: int, within_s: float) -> dict[str, Any]:
        """Ask for the writer's proof until True or `within_s` seconds have passed."""
        return self._ask(lambda: self._live.fence(self._peers[peer]), within_s)

    def revoke(self, epoch: int, within_s: float) -> dict[str, Any]:
        """Ask for the destination's proof until True or `within_s` seconds have passed."""
        return self._ask(lambda: self._live.revoke(epoch), within_s)

    def admit(self, epoch: int, blob: bytes) -> None:
        """Agree with an incarnation, for the first time or again."""
        self._live.admit(epoch, blob)

    def stream(self, peer: int, batch: dict[str, bytes], for_s: float, depth: int = 1) -> dict[str, int]:
        """Post one batch after another for `for_s` seconds, `depth` of them at once; how many ended how."""
        built = batch_from_wire(batch)
        target = self._peers[peer]
        counts = {"done": 0, "failed": 0, "unknown": 0, "pending": 0, "refused": 0}
        flying: deque[Transfer] = deque()
        end = time.monotonic() + for_s
        while time.monotonic() < end:
            while len(flying) < depth:
                try:
                    flying.append(self._live.write(target, built, deadline_s=0.5))
                except PdError:
                    counts["refused"] += 1
                    self._pump(lambda: False, 0.01)
                    break
            if flying:
                oldest = flying.popleft()
                self._pump(lambda t=oldest: t.poll() is not TransferState.PENDING, 1.0)  # type: ignore[misc]
                counts[oldest.poll().value] += 1
        return counts

    def repeat(self, peer: int, batch: dict[str, bytes], count: int) -> dict[str, Any]:
        """Post and finish `count` transfers one after another; how many were DONE, and the median time of one."""
        built = batch_from_wire(batch)
        target = self._peers[peer]
        done = 0
        times = np.empty(count)
        for i in range(count):
            began = time.perf_counter()
            transfer = self._live.write(target, built)
            while transfer.poll() is TransferState.PENDING:
                self._live.progress()
                if time.perf_counter() - began > 0.001:
                    time.sleep(POLL_INTERVAL_S)
                if time.perf_counter() - began > 30.0:
                    break
            times[i] = time.perf_counter() - began
            done += transfer.poll() is TransferState.DONE
        return {"done": done, "p50_s": float(np.median(times))}

    # visibility: the two processes talk to each other on the side channel

    def rounds_send(self, peer: int, batch: dict[str, bytes], rounds: int) -> int:
        """`rounds` times: stamp the source, write, await DONE, tell the other process; rounds it confirmed."""
        built = batch_from_wire(batch)
        confirmed = 0
        for number in range(rounds):
            memory.fill(self._segments[0], 0, int(built.length[0]), number % 251)
            transfer = self._live.write(self._peers[peer], built)
            self._pump(lambda t=transfer: t.poll() is not TransferState.PENDING, 30.0)  # type: ignore[misc]
            if transfer.poll() is not TransferState.DONE:
                break
            self._side.send(number)
            confirmed += self._receive_side() is True
        self._side.send(-1)
        return confirmed

    def rounds_check(self, nbytes: int) -> int:
        """Answer each stamp of `rounds_send` with whether all `nbytes` bytes of segment 0 show it; rounds seen."""
        seen = 0
        while (number := self._receive_side()) >= 0:
            self._side.send(bool((memory.read_bytes(self._segments[0], 0, nbytes) == number % 251).all()))
            seen += 1
        return seen

    def _receive_side(self) -> Any:
        self._pump(lambda: bool(select.select([self._side], [], [], 0)[0]), 30.0)
        return self._side.receive(5.0)

    # figures

    def usage(self) -> dict[str, float]:
        """Resident bytes, open descriptors, threads and CPU seconds of this process."""
        with open("/proc/self/statm") as statm:
            resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        times = os.times()
        return {
            "resident_bytes": resident,
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "cpu_s": times.user + times.system,
        }

    # inside

    @property
    def _live(self) -> Backend:
        if self._backend is None:
            raise RuntimeError("no backend was created")
        return self._backend

    def _ask(self, question: Callable[[], bool], within_s: float) -> dict[str, Any]:
        began = time.monotonic()
        answer = [False]

        def asked() -> bool:
            answer[0] = question()
            return answer[0]

        self._pump(asked, within_s)
        return {"proven": answer[0], "took_s": time.monotonic() - began}

    def _pump(self, until: Callable[[], bool], within_s: float) -> None:
        """Progress until the condition holds or `within_s` seconds have passed."""
        began = time.monotonic()
        while not until():
            self._live.progress()
            waited = time.monotonic() - began
            if waited > within_s:
                return
            if waited > 0.001:
                time.sleep(POLL_INTERVAL_S)

    def _idle(self, commands: Channel) -> None:
        """Wait for the next command as an owner thread would: on descriptors, with the backend's own interval."""
        while True:
            watched: list[Any] = [commands]
            interval = None
            if self._backend is not None:
                interval = self._backend.progress_interval_s if self._peers else None
                wakeup = self._backend.wakeup_fd()
                watched += [] if wakeup is None else [wakeup]
            ready = select.select(watched, [], [], interval)[0]
            if commands in ready:
                return
            if self._backend is not None:
                self._backend.progress()

    def _serve(self, commands: Channel) -> None:
        while True:
            self._idle(commands)
            name, arguments = commands.receive(None)
            if name == "exit":
                return
            try:
                value = getattr(self, name)(**arguments)
                reply: dict[str, Any] = {"value": value}
            except PdError as error:
                reply = {"error": error.info(), "type": type(error).__name__}
            except Exception:
                reply = {"crash": traceback.format_exc()}
            commands.send(reply)


def _foreign(nbytes: int) -> Segment:
    page = 4096
    owner = np.zeros(nbytes + page, np.uint8)
    address = -(-owner.ctypes.data // page) * page
    return Segment(address=address, nbytes=nbytes, device="cpu", keep_alive=owner)


def main() -> None:
    """Serve commands on the socket whose descriptor is argument 1; argument 2 is the side channel's."""
    commands, side = (Channel(socket.socket(fileno=int(number))) for number in sys.argv[1:3])
    code = 0
    try:
        Child(side)._serve(commands)
    except ChannelClosed:
        pass
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
