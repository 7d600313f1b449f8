"""The parts of the `nixl` backend that need no library: options, blob, pieces, proofs of death."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pd.backends.base import Segment, TransferState, check_batch
from sglang_pd.backends.library.blob import SegmentEntry
from sglang_pd.backends.library.process import (
    ProcessIdentity,
    Watch,
    elsewhere,
    own_identity,
    process_gone,
    same_pid_namespace,
)
from sglang_pd.backends.library.rows import Rows
from sglang_pd.backends.library.segments import allocate_host, check_mapped
from sglang_pd.backends.library.transfer import LibraryTransfer
from sglang_pd.backends.nixl.backend import NixlBackend
from sglang_pd.backends.nixl.blob import ENVELOPE, MAGIC, AgentBlob, agent_name, decode_blob
from sglang_pd.backends.nixl.options import NixlOptions, check_environment, may_use_rdma, parse_options
from sglang_pd.backends.nixl.pieces import (
    DIRECT_BYTES,
    DIRECT_DESCRIPTORS,
    Bounds,
    Piece,
    bounds,
    cut,
    pieces,
    single_piece,
)
from sglang_pd.backends.nixl.probe import Transports
from sglang_pd.backends.sides import Side
from sglang_pd.protocol.batch import RegionTable, WriteBatch
from sglang_pd.protocol.errors import BackendError, ConfigError, TransferError

# Options


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"num_thread": 2}, "$.backend.options.num_thread"),
        ({"num_threads": -1}, "$.backend.options.num_threads"),
        ({"num_threads": True}, "$.backend.options.num_threads"),
        ({"progress_thread": "yes"}, "$.backend.options.progress_thread"),
        ({"max_deadline_s": 0}, "$.backend.options.max_deadline_s"),
        ({"plugin": "POSIX"}, "$.backend.options.plugin"),
        ({"plugin_params": []}, "$.backend.options.plugin_params"),
        ({"plugin_params": {"num_worker": 1}}, "$.backend.options.plugin_params.num_worker"),
        ({"plugin_params": {"num_threads": 1}}, "$.backend.options.plugin_params.num_threads"),
        (
            {"plugin_params": {"ucx_error_handling_mode": "none"}},
            "$.backend.options.plugin_params.ucx_error_handling_mode",
        ),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, object], where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options(options)
    assert caught.value.where == where
    assert caught.value.expected


@pytest.mark.parametrize(
    ("options", "where", "expected", "actual"),
    [
        ({"progress_thread": 1}, "progress_thread", "`bool`", "`int`"),
        ({"num_threads": "two"}, "num_threads", "`int`", "`str`"),
    ],
)
def test_a_wrong_type_is_named_with_the_right_one(
    options: dict[str, object], where: str, expected: str, actual: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options(options)
    error = caught.value
    assert (error.where, error.expected, error.actual) == (f"$.backend.options.{where}", expected, actual)


def test_unknown_option_lists_and_suggests() -> None:
    with pytest.raises(ConfigError, match="num_threads") as caught:
        parse_options({"num_thread": 2})
    assert "progress_thread" in str(caught.value.expected)


def test_peer_error_mode_is_always_asked_for() -> None:
    assert parse_options({}).backend_params() == {"ucx_error_handling_mode": "peer"}
    params = parse_options({"num_threads": 2, "plugin_params": {"num_workers": 3}}).backend_params()
    assert params == {"ucx_error_handling_mode": "peer", "num_threads": "2", "num_workers": "3"}


@pytest.mark.parametrize("tls", ["sm,self", "cma", "posix,sysv", "^tcp", "cuda_ipc,cuda_copy,sm,self"])
def test_transports_without_peer_errors_are_refused(tls: str) -> None:
    with pytest.raises(ConfigError, match="UCX_TLS"):
        check_environment(NixlOptions(), {"UCX_TLS": tls}, ())


@pytest.mark.parametrize("tls", ["", "all", "tcp,self", "cma,tcp,self", "^cma", "cuda_ipc,cuda_copy,sm,tcp,self"])
def test_transports_with_tcp_are_accepted(tls: str) -> None:
    check_environment(NixlOptions(), {"UCX_TLS": tls} if tls else {}, ())


def test_engine_config_wins_over_the_environment() -> None:
    options = parse_options({"plugin_params": {"engine_config": "TLS=cma"}})
    with pytest.raises(ConfigError, match="UCX_TLS"):
        check_environment(options, {"UCX_TLS": "tcp"}, ())


def test_rdma_counts_only_where_there_is_a_device() -> None:
    check_environment(NixlOptions(), {"UCX_TLS": "rc,self"}, ("mlx5_0",))
    with pytest.raises(ConfigError):
        check_environment(NixlOptions(), {"UCX_TLS": "rc,self"}, ())
    assert may_use_rdma(NixlOptions(), {}, ("mlx5_0",)) and not may_use_rdma(NixlOptions(), {}, ())
    assert not may_use_rdma(NixlOptions(), {"UCX_TLS": "tcp,self"}, ("mlx5_0",))
    assert may_use_rdma(NixlOptions(), {"UCX_TLS": "^cma"}, ("mlx5_0",))


def test_older_protocols_are_refused() -> None:
    with pytest.raises(ConfigError, match="UCX_PROTO_ENABLE"):
        check_environment(NixlOptions(), {"UCX_PROTO_ENABLE": "n"}, ())


def test_writes_that_wait_for_a_connection_are_refused() -> None:
    check_environment(NixlOptions(), {"UCX_TCP_CONN_NB": "n"}, ())
    config = {"plugin_params": {"engine_config": "TCP_CONN_NB=y"}}
    for options, settings in (({}, {"UCX_TCP_CONN_NB": "y"}), (config, {})):
        with pytest.raises(ConfigError, match="UCX_TCP_CONN_NB"):
            check_environment(parse_options(options), settings, ())


# Blob

BLOB = AgentBlob(
    epoch=77,
    agent=agent_name(77, 0),
    nixl_version="1.5.1",
    plugin="UCX",
    settings=5,
    process=ProcessIdentity("boot", 1, 2, 3),
    host_paths=["cma"],
    listens=[("127.0.0.1", 4711), ("fe80::1", 1)],
    segments=[SegmentEntry(4096, 8192, "cpu"), SegmentEntry(1 << 40, 1 << 33, "cuda:3")],
    metadata=b"opaque",
)


def read(data: bytes, epoch: int = 77) -> AgentBlob:
    return decode_blob(data, epoch=epoch, nixl_version="1.5.9", plugin="UCX")


def test_blob_round_trip() -> None:
    assert read(ENVELOPE.seal(BLOB)) == BLOB


@given(st.data())
def test_a_damaged_blob_is_refused(data: st.DataObject) -> None:
    whole = ENVELOPE.seal(BLOB)
    at = data.draw(st.integers(0, len(whole) - 1))
    bad = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    for damaged in (bad, whole[:at]):
        with pytest.raises(BackendError):
            read(damaged)


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    for data in (noise, MAGIC + noise):
        with pytest.raises(BackendError):
            read(data)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"epoch": 78, "agent": agent_name(78, 0)}, "epoch_stale"),
        ({"agent": agent_name(78, 0)}, "message_malformed"),
        ({"nixl_version": "1.6.0"}, "backend_unsupported"),
        ({"plugin": "LIBFABRIC"}, "backend_unsupported"),
        ({"segments": [SegmentEntry(0, 1, "cpu")]}, "message_malformed"),
        ({"segments": [SegmentEntry(1, 0, "cpu")]}, "message_malformed"),
        ({"segments": [SegmentEntry((1 << 64) - 10, 10, "cpu")]}, "message_malformed"),
        ({"segments": [SegmentEntry(1, 1, "cuda")]}, "message_malformed"),
        ({"segments": [SegmentEntry(1, 1, "cpu")] * 20_000}, "message_malformed"),
        ({"listens": [("localhost", 1)]}, "message_malformed"),
        ({"listens": [("127.0.0.1", 0)]}, "message_malformed"),
        ({"listens": [("127.0.0.1", 1)] * 65}, "message_malformed"),
    ],
)
def test_an_impossible_blob_is_refused(change: dict[str, object], code: str) -> None:
    with pytest.raises(BackendError) as caught:
        read(ENVELOPE.seal(msgspec.structs.replace(BLOB, **change)))
    assert caught.value.code == code


# Who is gone


def test_death_is_seen_once_and_for_all() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        identity = identity_of(child.pid)
        watch = Watch(identity)
        assert not watch.gone() and not process_gone(identity)
        child.kill()
        # Not reaped yet: a zombie has exited.
        assert wait_for(watch.gone) and process_gone(identity)
    assert watch.gone() and process_gone(identity)
    watch.close()
    assert watch.gone()


def identity_of(pid: int) -> ProcessIdentity:
    own = own_identity()
    with open(f"/proc/{pid}/stat") as stat:
        ticks = int(stat.read().rpartition(")")[2].split()[19])
    return ProcessIdentity(own.boot_id, own.pid_namespace, pid, ticks)


def wait_for(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


def test_a_reused_pid_is_another_process() -> None:
    own = own_identity()
    assert process_gone(ProcessIdentity(own.boot_id, own.pid_namespace, own.pid, own.start_ticks - 1))
    assert not process_gone(own)


def test_nothing_is_known_of_other_hosts_and_namespaces() -> None:
    own = own_identity()
    for other in (
        ProcessIdentity("elsewhere", own.pid_namespace, 1 << 22, 0),
        ProcessIdentity(own.boot_id, 1, 1 << 22, 0),
    ):
        assert not process_gone(other) and not same_pid_namespace(other) and elsewhere(other)


def test_a_process_that_could_not_say_who_it_is_is_not_taken_for_a_dead_or_a_distant_one() -> None:
    own = own_identity()
    for unread in (
        ProcessIdentity("", own.pid_namespace, own.pid, own.start_ticks),
        ProcessIdentity(own.boot_id, 0, own.pid, own.start_ticks),
        ProcessIdentity(own.boot_id, own.pid_namespace, own.pid, -1),
    ):
        assert not process_gone(unread) and not same_pid_namespace(unread) and not elsewhere(unread)


def test_without_a_descriptor_nobody_states_who_he_is() -> None:
    code = (
        "import os, resource\n"
        "from sglang_pd.backends.library import process\n"
        "own = process.own_identity()\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\n"
        "assert process.own_identity() == own and own.known\n"
        "process._forget_own()\n"
        "try:\n"
        "    process.own_identity()\n"
        "except OSError:\n"
        "    os._exit(7)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 7


# Pieces

WIDE = Bounds(4096, 64 << 20)


def sides(count: int = 3, nbytes: int = 1 << 20) -> tuple[Side, Side]:
    own = [Segment(address=(i + 1) * nbytes, nbytes=nbytes, device="cpu") for i in range(count)]
    peer = [SegmentEntry((i + 100) * nbytes, nbytes, "cpu") for i in range(count)]
    return Side(own), Side(peer)


def table(count: int, nbytes: int) -> RegionTable:
    number = np.arange(count, dtype=np.uint32)
    return RegionTable(number, np.zeros(count, np.uint64), np.full(count, nbytes, np.uint64))


@st.composite
def batches(draw: st.DrawFn) -> WriteBatch:
    """Descriptors among which many continue their neighbour, within a segment or across the border of two."""
    count = draw(st.integers(1, 30))
    unit = draw(st.sampled_from([1, 64, 4096]))
    rows = st.lists(st.integers(0, 40), min_size=count, max_size=count)
    src, dst = np.sort(np.array(draw(rows), np.uint64)), np.sort(np.array(draw(rows), np.uint64))
    regions = st.lists(st.integers(0, 2), min_size=count, max_size=count)
    src_region, dst_region = (np.sort(np.array(draw(regions), np.uint32)) for _ in range(2))
    length = np.array(draw(st.lists(st.integers(1, 3), min_size=count, max_size=count)), np.uint64) * np.uint64(unit)
    offsets = src * np.uint64(unit), dst * np.uint64(unit)
    tables = table(3, 1 << 20)
    return WriteBatch(tables, tables, src_region, offsets[0], dst_region, offsets[1], length)


def addressed(batch: WriteBatch, own: Side, peer: Side) -> Rows:
    return Rows.of(batch, own.base, peer.base)


def exact_pairs(addresses: Rows) -> list[tuple[int, int]]:
    rows = zip(addresses.src.tolist(), addresses.dst.tolist(), addresses.length.tolist(), strict=True)
    return sorted((s + i, d + i) for s, d, n in rows for i in range(n))


@given(batches(), st.integers(1, 7), st.sampled_from([1, 3, 64, 100, 5000]))
def test_pieces_move_the_same_bytes(batch: WriteBatch, most: int, most_bytes: int) -> None:
    own, peer = sides()
    if int(batch.length.sum()) > 20_000:
        batch = replace(batch, length=np.minimum(batch.length, np.uint64(200)))
    whole = addressed(batch, own, peer)
    moved = []
    for piece in pieces(whole, own, peer, Bounds(most, most_bytes)):
        local, remote = (np.asarray(rows) for rows in piece.rows)
        assert 0 < len(local) <= most and (local[:, 1] == remote[:, 1]).all()
        assert int(local[:, 1].sum()) <= most_bytes
        moved += [
            (s + i, d + i)
            for (s, n, _), (d, _, _) in zip(local.tolist(), remote.tolist(), strict=True)
            for i in range(n)
        ]
    assert sorted(moved) == exact_pairs(whole)


@pytest.mark.parametrize(
    ("src", "dst"), [([0, 0, 0, 1], [0, 0, 0, 1]), ([0, 0, 0, 1], [1] * 4), ([1] * 4, [0, 0, 0, 1])]
)
def test_neighbours_are_merged_but_not_across_segments(src: list[int], dst: list[int]) -> None:
    own, peer = sides(2, 4096)
    length = np.full(4, 1024, np.uint64)
    # All four continue their neighbour on both sides. Segments 0 and 1 touch, and are registered apart all the same.
    start = np.arange(4, dtype=np.uint64) * 1024
    number = np.array([src, dst], np.uint32)
    whole = Rows(own.base[0] + start, peer.base[0] + start, length, number[0], number[1])
    merged = whole.merged()
    assert merged.length.tolist() == [3072, 1024]
    assert merged.src_segment.tolist() == src[2:] and merged.dst_segment.tolist() == dst[2:]


def test_devices_go_apart_and_keep_their_numbers() -> None:
    own = Side([SegmentEntry(1 << 20, 4096, "cpu"), SegmentEntry(1 << 30, 4096, "cuda:2")])
    peer = Side([SegmentEntry(1 << 20, 4096, "cuda:1"), SegmentEntry(1 << 30, 4096, "cpu")])
    src, dst = np.array([0, 1, 1, 0], np.uint32), np.array([0, 0, 1, 1], np.uint32)
    offset, length = np.array([0, 0, 512, 512], np.uint64), np.full(4, 256, np.uint64)
    batch = WriteBatch(table(2, 4096), table(2, 4096), src, offset, dst, offset, length)
    found = {piece.kinds: piece for piece in pieces(addressed(batch, own, peer), own, peer, WIDE)}
    assert set(found) == {("cpu", "cuda"), ("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cpu")}
    assert [np.asarray(rows)[:, 2].tolist() for rows in found["cuda", "cuda"].rows] == [[2], [1]]
    assert found["cuda", "cuda"].source_device == "cuda:2"


@given(st.data())
def test_one_descriptor_is_judged_as_the_arrays_are(data: st.DataObject) -> None:
    own, peer = sides(2, 4096)
    near = st.sampled_from([0, 1, 4095, 4096, 4097, 2**63, 2**64 - 1])
    tables = [
        RegionTable(
            np.array([data.draw(st.integers(0, 2)), 1], np.uint32),
            np.array([data.draw(near), 0], np.uint64),
            np.array([data.draw(near), 4096], np.uint64),
        )
        for _ in range(2)
    ]
    region = [np.array([data.draw(st.integers(0, 2))], np.uint32) for _ in range(2)]
    offset = [np.array([data.draw(near)], np.uint64) for _ in range(2)]
    dtype = data.draw(st.sampled_from([np.uint64, np.int64, np.float64]))
    length = np.array([data.draw(near)], np.uint64).astype(dtype)
    batch = WriteBatch(*tables, region[0], offset[0], region[1], offset[1], length)  # type: ignore[arg-type]
    piece = single_piece(batch, own, peer)
    try:
        check_batch(batch, own.nbytes, peer.nbytes, peer="x")
    except BackendError:
        assert piece is None
        return
    assert piece is not None
    whole = addressed(replace(batch), own, peer)
    for most in (WIDE, Bounds(1, data.draw(st.integers(1000, 5000)))):
        expected = list(pieces(whole, own, peer, most))
        found = list(cut(piece, most.nbytes))
        assert [as_lists(one) for one in found] == [as_lists(one) for one in expected]


def as_lists(piece: Piece) -> tuple[Any, ...]:
    return (*(np.asarray(rows).tolist() for rows in piece.rows), piece.kinds, piece.source_device)


def test_pieces_copied_to_a_process_number_are_small_whatever_the_options_say() -> None:
    assert bounds(NixlOptions(), direct=False) == Bounds(4096, 64 << 20)
    assert bounds(NixlOptions(), direct=True) == Bounds(DIRECT_DESCRIPTORS, DIRECT_BYTES)
    small = NixlOptions(max_descriptors_per_post=7, max_bytes_per_post=4096)
    assert bounds(small, direct=True) == Bounds(7, 4096)


# Who needs no proof but its own


@pytest.mark.parametrize(
    ("changed", "options", "own", "direct"),
    [
        ({}, {}, ("cma",), True),
        ({"host_paths": ["cma", "tcp"]}, {}, ("cma",), False),
        ({"host_paths": []}, {}, (), False),
        ({"host_paths": ["tcp"]}, {}, ("tcp",), False),
        ({}, {}, ("cma", "tcp"), False),
        ({"settings": 6}, {}, ("cma",), False),
        ({"host_paths": ["knem"]}, {}, ("knem",), False),
        ({"process": ProcessIdentity("another host", 1, 2, 3)}, {}, ("cma",), False),
        ({"process": ProcessIdentity(own_identity().boot_id, 1, 2, 3)}, {}, ("cma",), False),
        ({"process": ProcessIdentity("", 0, 2, -1)}, {}, ("cma",), False),
        ({"segments": [SegmentEntry(4096, 8192, "cuda:0")]}, {}, ("cma",), False),
        ({}, {"num_threads": 2}, ("cma",), False),
        ({}, {"progress_thread": True}, ("cma",), False),
    ],
)
def test_a_writer_copies_itself_only_where_both_sides_have_nothing_but_cma(
    changed: dict[str, Any], options: dict[str, Any], own: tuple[str, ...], direct: bool
) -> None:
    backend: Any = object.__new__(NixlBackend)
    others = dict.fromkeys((("cpu", "cuda"), ("cuda", "cpu")), ("cma",))
    backend._host = Transports(others | ({("cpu", "cpu"): own} if own else {}))
    backend._digest, backend._device, backend._options = 5, False, NixlOptions(**options)
    here = {"process": own_identity(), "segments": [SegmentEntry(4096, 8192, "cpu")]}
    blob = msgspec.structs.replace(BLOB, **(here | changed))
    assert backend._writes_itself(blob) is direct
    backend._device = True
    assert not backend._writes_itself(blob)


@pytest.mark.parametrize(
    ("own", "possible"), [(None, True), (("cma",), True), (("cma", "tcp"), True), (("knem",), True), (("tcp",), False)]
)
def test_a_writer_of_this_host_may_copy_itself_unless_ucx_says_that_all_is_tcp(
    own: tuple[str, ...] | None, possible: bool
) -> None:
    backend: Any = object.__new__(NixlBackend)
    backend._host = Transports({("cpu", "cpu"): own} if own else {})
    assert backend._cma_possible() is possible


# State


def test_unknown_may_be_proven_and_final_is_final() -> None:
    transfer = LibraryTransfer("nixl", "peer", 1, 0.0)
    assert transfer.poll() is TransferState.UNKNOWN and not transfer.quiesced
    assert transfer.error is not None and transfer.error.code == "transfer_timeout"
    later = TransferError("later", code="peer_lost")
    assert transfer.settle(TransferState.FAILED, later) and transfer.quiesced
    assert transfer.error.code == "transfer_timeout"
    assert not transfer.settle(TransferState.DONE) and not transfer.settle(TransferState.UNKNOWN)
    assert transfer.poll() is TransferState.FAILED
    done = LibraryTransfer("nixl", "peer", 1, 0.0)
    assert done.poll() is TransferState.UNKNOWN and done.settle(TransferState.DONE) and done.error is None


# Memory


def test_unmapped_and_read_only_memory_is_refused() -> None:
    segment = allocate_host("nixl", 3 * 4096)
    check_mapped("nixl", segment)
    with pytest.raises(BackendError, match="memory_refused"):
        check_mapped("nixl", Segment(address=4096, nbytes=4096, device="cpu"))
    with pytest.raises(BackendError, match="memory_refused"):
        check_mapped("nixl", Segment(address=segment.address, nbytes=1 << 45, device="cpu"))
    with mmap.mmap(-1, 4096) as pages:
        view = np.frombuffer(pages, np.uint8)
        address = int(view.ctypes.data)
        del view
        check_mapped("nixl", Segment(address=address, nbytes=4096, device="cpu"))
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), 4096, mmap.PROT_READ) == 0
        with pytest.raises(BackendError, match="memory_refused"):
            check_mapped("nixl", Segment(address=address, nbytes=4096, device="cpu"))
