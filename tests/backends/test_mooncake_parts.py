"""The parts of the mooncake backend that need no library: options, environment, blob, merging, submissions, sockets."""

from __future__ import annotations

import importlib
import os
import socket
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pd.backends.library import sockets
from sglang_pd.backends.library.blob import SegmentEntry
from sglang_pd.backends.library.process import own_identity
from sglang_pd.backends.library.rows import Rows
from sglang_pd.backends.mooncake import blob as mooncake_blob
from sglang_pd.backends.mooncake import library as mooncake_library
from sglang_pd.backends.mooncake.backend import create, environment
from sglang_pd.backends.mooncake.blob import Blob
from sglang_pd.backends.mooncake.chunk import ChunkState, merge, submit
from sglang_pd.backends.mooncake.library import Library
from sglang_pd.backends.mooncake.options import check_environment, parse_options
from sglang_pd.protocol.errors import BackendError, BackendUnavailable, ConfigError

# options and environment


def test_environment_selects_one_transport_and_changes_nothing() -> None:
    before = dict(os.environ)
    tcp, rdma = environment({}), environment({"transport": "rdma", "gid_index": 3})
    nvlink = environment({"transport": "nvlink_intra"})
    assert tcp["MC_FORCE_TCP"] == "1" and tcp["MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"] == "65535"
    assert rdma["MC_FORCE_HCA"] == "1" and rdma["MC_GID_INDEX"] == "3"
    assert nvlink["MC_INTRANODE_NVLINK"] == "1"
    selectors = {"MC_FORCE_TCP", "MC_FORCE_HCA", "MC_INTRANODE_NVLINK"}
    assert [len(selectors & set(one)) for one in (tcp, rdma, nvlink)] == [1, 1, 1]
    assert dict(os.environ) == before


@pytest.mark.parametrize("options", [{}, {"ports": [20_000, 20_100]}, {"transport": "rdma"}])
def test_the_environment_asked_for_is_accepted(options: dict[str, Any]) -> None:
    parsed = parse_options(options)
    wanted = environment(parsed)
    assert check_environment(parsed, {**wanted, "HOME": "/"}) == wanted


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MC_FORCE_HCA", "0"),
        ("MC_INTRANODE_NVLINK", "1"),
        ("MC_LOG_DIR", "/tmp"),
        ("MC_TCP_PROTO", "1"),
        ("MC_TCP_ENABLE_CONNECTION_POOL", "False"),
        ("MC_DISABLE_METACACHE", "1"),
        ("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "512"),
        ("MC_TRANSFER_TIMEOUT", "30"),
        ("MC_FORCE_TCP", None),
        ("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", None),
        ("MC_TRANSFER_TIMEOUT", None),
    ],
)
def test_what_contradicts_or_is_missing_is_refused_by_name(name: str, value: str | None) -> None:
    parsed = parse_options({})
    environ = environment(parsed)
    environ.pop(name, None)
    if value is not None:
        environ[name] = value
    with pytest.raises(ConfigError, match=name):
        check_environment(parsed, environ)


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"transprot": "tcp"}, "transprot"),
        ({"transport": "nvlink"}, "transport"),
        ({"bind": "localhost"}, "bind"),
        ({"bind": "0.0.0.0"}, "advertise"),
        ({"ports": [20_000, 20_003]}, "ports"),
        ({"devices": ["mlx5_0"]}, "devices"),
        ({"max_descriptors_per_peer": 0}, "max_descriptors_per_peer"),
        ({"max_bytes_per_peer": "64"}, "max_bytes_per_peer"),
    ],
)
def test_a_bad_option_is_named(options: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError, match=where) as caught:
        parse_options(options)
    assert caught.value.code == "config_invalid"


def test_create_refuses_an_environment_that_was_not_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("MC_"):
            monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match="MC_FORCE_TCP"):
        create(epoch=1, options={})


# the library


@pytest.mark.parametrize(
    ("error", "where", "hint"),
    [
        (ModuleNotFoundError("No module named 'mooncake'"), "mooncake-transfer-engine", "pip install"),
        (ImportError("libibverbs.so.1: cannot open shared object file"), "libibverbs.so.1", "libibverbs1"),
        (ImportError("libmlx5.so.1: cannot open shared object file"), "libmlx5.so.1", "ibverbs-providers"),
    ],
)
def test_what_is_missing_is_named_with_its_command(
    monkeypatch: pytest.MonkeyPatch, error: ImportError, where: str, hint: str
) -> None:
    def fail(name: str) -> Any:
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(BackendUnavailable) as caught:
        mooncake_library.load(parse_options({}))
    assert where in caught.value.where and hint in caught.value.hint


def test_rdma_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(mooncake_library, "RDMA_DEVICES", str(tmp_path))
    with pytest.raises(BackendUnavailable, match="at least one device"):
        mooncake_library.load(parse_options({"transport": "rdma"}))
    (tmp_path / "mlx5_0").mkdir()
    with pytest.raises(BackendUnavailable, match="mlx5_7"):
        mooncake_library.load(parse_options({"transport": "rdma", "devices": ["mlx5_7"]}))


# the blob


def blob(**changes: Any) -> Blob:
    facts: dict[str, Any] = {
        "mooncake_version": "0.3.13",
        "transport": "tcp",
        "epoch": (1 << 64) - 1,
        "generation": 2,
        "session": "127.0.0.1:15001",
        "identity_address": 4096,
        "segments": [SegmentEntry(1 << 40, 64, "cpu"), SegmentEntry(1 << 41, 128, "cpu")],
        "process": own_identity(),
    }
    return Blob(**{**facts, **changes})


def test_a_blob_comes_back_whole() -> None:
    assert mooncake_blob.decode(mooncake_blob.ENVELOPE.seal(blob())) == blob()


@given(st.data())
def test_a_damaged_blob_is_refused(data: st.DataObject) -> None:
    whole = bytearray(mooncake_blob.ENVELOPE.seal(blob()))
    if data.draw(st.booleans()):
        del whole[data.draw(st.integers(0, len(whole) - 1)) :]
    else:
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(BackendError):
        mooncake_blob.decode(bytes(whole))


@given(st.binary(max_size=200))
def test_noise_is_no_blob(noise: bytes) -> None:
    with pytest.raises(BackendError):
        mooncake_blob.decode(noise)


@pytest.mark.parametrize(
    "changes",
    [
        {"segments": [SegmentEntry(1 << 40, 0, "cpu")]},
        {"segments": [SegmentEntry(1 << 40, 64, "tape")]},
        {"segments": [SegmentEntry((1 << 64) - 64, 128, "cpu")]},
        {"segments": [SegmentEntry(1 << 40, 64, "cpu")] * 4097},
        {"session": "nowhere"},
        {"session": "host:99999"},
        {"generation": -1},
    ],
)
def test_a_blob_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BackendError):
        mooncake_blob.decode(mooncake_blob.ENVELOPE.seal(blob(**changes)))


# merging


@st.composite
def scattered(draw: st.DrawFn) -> Rows:
    count = draw(st.integers(1, 40))
    lengths = draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    gaps = draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
    dst, at = [], 1000
    for length, gap in zip(lengths, gaps, strict=True):
        at += gap
        dst.append(at)
        at += length
    shift = draw(st.lists(st.sampled_from([0, 0, 0, 500]), min_size=count, max_size=count))
    src = [d + 10_000 + s for d, s in zip(dst, shift, strict=True)]
    pair = draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
    order = draw(st.permutations(range(count)))
    columns = [np.array([c[i] for i in order]) for c in (src, dst, lengths, pair)]
    return Rows(*[c.astype(np.uint64) for c in columns[:3]], *[columns[3].astype(np.uint32)] * 2)


def bytes_of(pieces: Rows) -> dict[int, tuple[int, int]]:
    moved = {}
    rows = zip(*(c.tolist() for c in (pieces.src, pieces.dst, pieces.length, pieces.dst_segment)), strict=True)
    for src, dst, length, pair in rows:
        for i in range(length):
            assert dst + i not in moved
            moved[dst + i] = (src + i, pair)
    return moved


@given(scattered(), st.integers(1, 20))
def test_merging_moves_the_same_bytes_in_bounded_pieces(pieces: Rows, most: int) -> None:
    merged = merge(pieces, most)
    assert bytes_of(merged) == bytes_of(pieces)
    assert 0 < int(merged.length.min()) and int(merged.length.max()) <= most
    assert (merged.dst[1:] > merged.dst[:-1]).all()


def test_neighbours_become_one() -> None:
    at = np.arange(8, dtype=np.uint64) * np.uint64(64)
    none = np.zeros(8, np.uint32)
    pieces = Rows(at[::-1] + np.uint64(4096), at[::-1], np.full(8, 64, np.uint64), none, none)
    assert merge(pieces, 1 << 20).length.tolist() == [512]


# submissions


class FakeRaw:
    """The calls of the library that a submission makes; refuses from `fail_at` on."""

    def __init__(self, fail_at: int = 1 << 30, batch_id: int = 7, batch_status: int = 0) -> None:
        self.fail_at, self.batch_id, self.batch_status = fail_at, batch_id, batch_status
        self.submitted: list[tuple[int, int, int]] = []
        self.codes: dict[int, int] = {}
        self.asked: list[int] = []

    def transfer_submit_write(self, session: str, src: int, dst: int, length: int) -> int:
        if len(self.submitted) >= self.fail_at:
            return (1 << 64) - 1
        self.submitted.append((src, dst, length))
        return 1000 + len(self.submitted)

    def transfer_check_status(self, one: int) -> int:
        assert one > 1000
        return self.codes.get(one, 1)

    def batch_transfer_async_write(self, session: str, src: list[int], dst: list[int], length: list[int]) -> int:
        self.submitted += list(zip(src, dst, length, strict=True))
        return self.batch_id

    def get_batch_transfer_status(self, ids: list[int]) -> int:
        self.asked += ids
        return self.batch_status


def library(**changes: Any) -> Library:
    facts: dict[str, Any] = {
        "module": None,
        "version": "0.3.13",
        "flags": {},
        "has_tickets": False,
        "has_arrays": False,
    }
    return Library(**{**facts, **changes})


def some(count: int) -> Rows:
    at = np.arange(count, dtype=np.uint64) * np.uint64(128) + np.uint64(1 << 20)
    segment = np.zeros(count, np.uint32)
    return Rows(at, at + np.uint64(1 << 30), np.full(count, 64, np.uint64), segment, segment.copy())


def test_a_batch_is_asked_for_only_after_its_sentinel() -> None:
    raw = FakeRaw()
    chunk = submit(library(), raw, "s", some(40), "tcp")
    raw.codes[1040] = 0
    assert chunk.poll() is ChunkState.RUNNING and raw.asked == []
    raw.codes[1040] = 1
    assert chunk.poll() is ChunkState.DONE and raw.asked == [7] and len(raw.submitted) == 40


@pytest.mark.parametrize("batch_id", [0, -1, (1 << 64) - 1])
def test_a_batch_that_was_not_taken_is_lost_and_never_asked_for(batch_id: int) -> None:
    raw = FakeRaw(batch_id=batch_id)
    chunk = submit(library(), raw, "s", some(40), "tcp")
    assert chunk.poll() is ChunkState.LOST and raw.asked == []


@pytest.mark.parametrize("code", [-1, -2])
def test_any_failure_is_lost(code: int) -> None:
    raw = FakeRaw(batch_status=-1)
    assert submit(library(), raw, "s", some(40), "tcp").poll() is ChunkState.LOST
    raw = FakeRaw()
    raw.codes[1002] = code
    chunk = submit(library(), raw, "s", some(3), "tcp")
    assert chunk.poll() is ChunkState.LOST and str(code) in chunk.reason
    assert submit(library(), FakeRaw(fail_at=2), "s", some(3), "tcp").poll() is ChunkState.LOST
    assert submit(library(), None, "s", some(3), "tcp").poll() is ChunkState.LOST


class FakeStatus:
    def __init__(self, name: str) -> None:
        self.name = name


class FakeTicketRaw:
    def __init__(self) -> None:
        self.status = "COMPLETION_UNKNOWN"
        self.arguments: tuple[Any, ...] = ()

    def submit_scatter_write(self, *arguments: Any) -> FakeTicketRaw:
        self.arguments = arguments
        return self

    def drain(self, timeout_ms: int) -> FakeStatus:
        assert timeout_ms == 0
        return FakeStatus(self.status)


@pytest.mark.parametrize(
    ("transport", "status", "state"),
    [
        ("nvlink_intra", "COMPLETION_UNKNOWN", ChunkState.RUNNING),
        ("nvlink_intra", "COMPLETED", ChunkState.DONE),
        ("nvlink_intra", "FAILED_DRAINED", ChunkState.DRAINED),
        ("rdma", "FAILED_DRAINED", ChunkState.LOST),
    ],
)
def test_tickets(transport: str, status: str, state: ChunkState) -> None:
    raw = FakeTicketRaw()
    pieces = some(4)
    pieces.src_segment[2:] = 1
    chunk = submit(library(has_tickets=True), raw, "s", pieces, transport)
    raw.status = status
    assert chunk.poll() is state
    _, src_base, src_room, dst_base, dst_room, src, dst, length = raw.arguments
    rebuilt = [
        (b + o, d + p, n)
        for b, d, s, t, ns in zip(src_base, dst_base, src, dst, length, strict=True)
        for o, p, n in zip(s, t, ns, strict=True)
    ]
    rows = zip(pieces.src.tolist(), pieces.dst.tolist(), pieces.length.tolist(), strict=True)
    assert rebuilt == list(rows) and len(src_base) == 2
    assert src_room == dst_room == [192, 192]


# sockets


def test_own_listeners_tells_where_a_socket_is_bound() -> None:
    with socket.socket() as narrow, socket.socket(socket.AF_INET6) as wide, socket.socket() as silent:
        narrow.bind(("127.0.0.1", 0))
        wide.bind(("::", 0))
        silent.bind(("127.0.0.1", 0))
        narrow.listen()
        wide.listen()
        found = {one.port: one for one in sockets.own_listeners()}
        assert found[narrow.getsockname()[1]].address == "127.0.0.1"
        assert not found[narrow.getsockname()[1]].on_all_interfaces
        assert found[wide.getsockname()[1]].on_all_interfaces
        assert silent.getsockname()[1] not in found


def test_a_reserved_port_can_be_listened_on_by_nobody() -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        port = other.getsockname()[1]
        assert sockets.reserve(port) is None
    held = sockets.reserve(port)
    assert held is not None
    with held, socket.socket() as late, pytest.raises(OSError):
        late.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        late.bind(("0.0.0.0", port))
