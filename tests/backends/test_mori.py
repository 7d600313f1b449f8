"""The `mori` backend: what needs no library here, and scenarios in child processes over the stand-in."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pd.backends.base import TransferState
from sglang_pd.backends.library.process import ProcessIdentity
from sglang_pd.backends.library.rows import Rows
from sglang_pd.backends.library.transfer import LibraryTransfer
from sglang_pd.backends.mori.blob import ENVELOPE, MAGIC, EngineBlob, SegmentEntry, decode_blob
from sglang_pd.backends.mori.options import MoriOptions, check_environment, mori_settings, parse_options
from sglang_pd.backends.mori.pieces import pieces
from sglang_pd.backends.mori.probe import _judge
from sglang_pd.backends.registry import create_backend
from sglang_pd.protocol.errors import BackendError, BackendUnavailable, ConfigError, TransferError

STAND_IN = Path(__file__).resolve().parent.parent / "support" / "fake_mori"

SCENARIOS = [
    "late_transfer_is_held",
    "a_status_that_ends_between_two_looks",
    "peers_and_forks_of_others_are_refused",
    "rest_is_never_posted",
    "dead_pair_is_rebuilt",
    "engines_are_bounded",
    "close_keeps_what_is_unfinished",
    "close_drains",
    "progress_after_close_reads_nothing",
    "disconnect_goes_on_holding",
    "silent_peer_blocks_nobody",
    "nobody_there",
    "lost_status_condemns_the_engine",
    "skewed_descriptors",
    "heartbeat_finds_a_dead_pair",
    "what_the_library_gets",
    "events_are_awaited",
    "adoption",
    "unusable_library",
]


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str) -> None:
    command = [sys.executable, "-W", "error", str(STAND_IN / "scenarios.py"), name]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MORI_", "FAKE_MORI_"))}
    return kept | {"PYTHONPATH": str(STAND_IN)}


def test_every_scenario_is_run() -> None:
    lines = (STAND_IN / "scenarios.py").read_text().splitlines()
    found = [line[4:-11] for line in lines if line.startswith("def ") and line.endswith("() -> None:")]
    assert found == SCENARIOS


# No library


def test_without_the_package() -> None:
    """The stand-in is never importable from the product: this process has no package of that name."""
    with pytest.raises(BackendUnavailable, match="amd-mori") as caught:
        create_backend("mori", epoch=1)
    assert "pip install" in caught.value.hint


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "amd_mori-1.2.5.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: amd-mori\nVersion: 1.2.5\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BackendUnavailable, match=r"expected 1\.2\.4, got 1\.2\.5"):
        create_backend("mori", epoch=1)


@pytest.mark.parametrize(
    ("status", "text", "words"),
    [
        (0, "noise\n", "status 0; it said: noise"),
        (255, "", r"exit\(255\).*port in use"),
        (-11, "", "SIGSEGV"),
        (-250, "", "250"),
        (0, '@mori-probe {"error": {"message": "m", "where": "w", "actual": "a", "hint": "h"}}', r"w: m .*a.*\. h"),
    ],
)
def test_the_child_is_judged(status: int, text: str, words: str) -> None:
    with pytest.raises(BackendUnavailable, match=words):
        _judge(status, text, MoriOptions())


def test_a_good_child_is_believed() -> None:
    _judge(0, '\n@mori-probe {"error": null}\n', MoriOptions())


# Options


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ({"transport": "tcp"}, "config_invalid", "no such backend"),
        ({"transport": "xgmi"}, "config_invalid", "never tried"),
        ({"qp_per_transfers": 2}, "config_invalid", "Did you mean 'qp_per_transfer'"),
        ({"port": 1}, "config_invalid", "reserves"),
        ({"port": 2.5}, "config_invalid", r"\.port"),
        ({"calls_in_flight": True}, "config_invalid", r"\.calls_in_flight"),
        ({"max_block_bytes": 1 << 32}, "config_invalid", r"\.max_block_bytes"),
        ({"drain_s": -1}, "config_invalid", r"\.drain_s"),
        ({"poll_cq_mode": "busy"}, "config_invalid", "polling | event"),
        ({"host": ""}, "config_invalid", r"\.host"),
        ({"host": "0.0.0.0"}, "config_invalid", r"\.host"),
        ({"host": "some-machine"}, "config_invalid", "no name"),
        ({"host": "8.8.8.8"}, "insecure_refused", "no authentication"),
    ],
)
def test_options_are_refused(options: dict[str, Any], code: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse_options(options)
    assert caught.value.code == code and "$.backend.options" in caught.value.where


def test_options_are_accepted() -> None:
    assert parse_options({}) == MoriOptions()
    parsed = parse_options({"host": "8.8.8.8", "insecure_data_plane": True, "drain_s": 0, "heartbeat_s": 0.5})
    assert parsed.host == "8.8.8.8" and parsed.drain_s == 0


@pytest.mark.parametrize(
    ("name", "value", "refused"),
    [
        ("MORI_IO_ENABLE_NOTIFICATION", "1", True),
        ("MORI_IO_ENABLE_NOTIFICATION", "0", False),
        ("MORI_IO_QP_PER_TRANSFER", "4", True),
        ("MORI_IO_QP_PER_TRANSFER", "1", False),
        ("MORI_IO_POLL_CQ_MODE", "EVENT", True),
        ("MORI_DISABLE_AUTO_XGMI", "0", True),
        ("MORI_IO_QP_TIMEOUT", "16", False),
    ],
)
def test_overriding_settings_are_refused(name: str, value: str, refused: bool) -> None:
    settings = mori_settings({name: value, "PATH": "/bin"})
    assert settings == {name: value}
    if not refused:
        check_environment(MoriOptions(), settings)
        return
    with pytest.raises(ConfigError, match=name):
        check_environment(MoriOptions(), settings)


# The blob


def blob(**changes: Any) -> bytes:
    facts: dict[str, Any] = {
        "epoch": 7,
        "mori_version": "1.2.4",
        "key": f"sglang-pd-{7:016x}-ab",
        "process": ProcessIdentity("boot", 1, 2, 3),
        "engine": b"e",
        "door": b"d",
        "segments": [SegmentEntry(10, "cpu", b"m")],
    }
    return ENVELOPE.seal(EngineBlob(**{**facts, **changes}))


def test_a_blob_is_read_back() -> None:
    assert decode_blob(blob(), epoch=7, mori_version="1.2.4").segments == [SegmentEntry(10, "cpu", b"m")]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (blob(mori_version="1.2.3"), "backend_unsupported"),
        (b"PD-NIXL\n" + blob()[8:], "backend_unsupported"),
        (MAGIC + b"\xff" + blob()[9:], "backend_unsupported"),
        (blob(epoch=8), "epoch_stale"),
        (blob(key="sglang-pd-0-ab"), "message_malformed"),
        (blob(door=b""), "message_malformed"),
        (blob(engine=b"x" * 5000), "message_malformed"),
        (blob(segments=[SegmentEntry(0, "cpu", b"m")]), "message_malformed"),
        (blob(segments=[SegmentEntry(8, "tape:0", b"m")]), "message_malformed"),
        (blob(segments=[SegmentEntry(8, "cpu", b"m")] * 4097), "message_malformed"),
        (blob()[:-1], "message_malformed"),
        (blob()[:-1] + b"\0", "message_malformed"),
        (blob() + bytes(1 << 20), "message_malformed"),
    ],
)
def test_a_blob_is_refused(data: bytes, code: str) -> None:
    with pytest.raises(BackendError) as caught:
        decode_blob(data, epoch=7, mori_version="1.2.4")
    assert caught.value.code == code


# Pieces and states

Row = tuple[int, int, int, int, int]


@given(
    rows=st.lists(st.tuples(*(st.integers(0, high) for high in (2, 40, 2, 40)), st.integers(1, 30)), min_size=1),
    blocks=st.integers(1, 5),
    call_bytes=st.integers(1, 40),
    block_bytes=st.integers(1, 40),
)
def test_pieces_are_the_batch(rows: list[Row], blocks: int, call_bytes: int, block_bytes: int) -> None:
    """Byte by byte the pieces move what the batch does, in calls within every limit, one pair of segments each."""
    options = MoriOptions(max_blocks_per_call=blocks, max_bytes_per_call=call_bytes, max_block_bytes=block_bytes)
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    src, src_offset, dst, dst_offset, length = columns
    offsets = (one.astype(np.uint64) for one in (src_offset, dst_offset, length))
    batch = Rows(*offsets, src.astype(np.uint32), dst.astype(np.uint32))
    moved: Counter[tuple[int, int, int, int]] = Counter()
    for piece in pieces(batch, options):
        given_ = piece.blocks
        assert len(given_.src_offsets) == len(given_.dst_offsets) == len(given_.lengths) <= blocks
        assert 0 < sum(given_.lengths) <= call_bytes and max(given_.lengths) <= block_bytes
        for a, b, n in zip(given_.src_offsets, given_.dst_offsets, given_.lengths, strict=True):
            moved.update((piece.src_segment, a + i, piece.dst_segment, b + i) for i in range(n))
    assert moved == Counter((s, a + i, d, b + i) for s, a, d, b, n in rows for i in range(n))


def test_neighbours_are_merged() -> None:
    offset = np.arange(1000, dtype=np.uint64) * np.uint64(64)
    number = np.zeros(1000, np.uint32)
    batch = Rows(offset, offset + np.uint64(5), np.full(1000, 64, np.uint64), number, number)
    (piece,) = pieces(batch, MoriOptions())
    assert (piece.blocks.src_offsets, piece.blocks.dst_offsets, piece.blocks.lengths) == ([0], [5], [64000])


def test_states_never_go_back() -> None:
    late = LibraryTransfer("mori", "peer", 1, -1.0)
    assert late.poll() is TransferState.UNKNOWN and late.error is not None and not late.quiesced
    assert late.error.code == "transfer_timeout"
    assert not late.settle(TransferState.UNKNOWN, TransferError("later cause")) and "not done" in late.error.message
    assert late.settle(TransferState.FAILED, TransferError("later cause")) and late.error.code == "transfer_timeout"
    assert not late.settle(TransferState.DONE) and late.poll() is TransferState.FAILED
