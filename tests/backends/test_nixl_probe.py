"""Reading UCX's tables, as printed by UCX 1.23: which transport the `nixl` backend has."""

from __future__ import annotations

import pytest

from sglang_pd.backends.nixl.probe import read_tables

TABLES = """
[1795990493.103318] [vm:5547 :0]   | A self cfg#0                                             |
[1795990493.103318] [vm:5547 :0]   | remote memory write by ucp_put* from host memory to host |
[1795990493.103318] [vm:5547 :0]   | 0..inf | zero-copy   | self/memory                       |
[1795990493.187187] [vm:5547 :0]   | A intra-node cfg#1                                       |
[1795990493.187187] [vm:5547 :0]   | remote memory write by ucp_put* from host memory to host |
[1795990493.187187] [vm:5547 :0]   +--------+-------------+-----------------------------------+
[1795990493.187187] [vm:5547 :0]   | Range  | Description |              Config               |
[1795990493.187187] [vm:5547 :0]   | 0..inf | zero-copy   | {config} |
[1795990493.187931] [vm:5547 :0]   | A intra-node cfg#1                              |
[1795990493.187931] [vm:5547 :0]   | active message by ucp_am_send* from host memory |
[1795990493.187931] [vm:5547 :0]   | 16516..inf | multi-frag copy-in | tcp/lo        |
"""


@pytest.mark.parametrize(
    ("config", "used"),
    [
        ("cma/memory", ("cma",)),
        ("52% on tcp/lo and 48% on tcp/eth0", ("tcp",)),
        ("50% on rc_mlx5/mlx5_0:1 and 50% on tcp/eth0", ("rc_mlx5", "tcp")),
    ],
)
def test_transport_is_read_from_the_tables_of_writes_alone(config: str, used: tuple[str, ...]) -> None:
    found = read_tables(TABLES.replace("{config}", config))
    assert found.paths == {("cpu", "cpu"): used}
    assert found.verified_without_tcp("cpu", "cpu") is ("tcp" not in used)
    assert not found.verified_without_tcp("cuda", "cuda") and found.name("cuda", "cuda") == "unknown"


def test_device_memory_is_another_path() -> None:
    text = TABLES.replace("{config}", "cma/memory") + TABLES.replace("{config}", "cuda_ipc/cuda").replace(
        "from host memory to host", "from cuda/GPU0 to cuda/GPU1"
    )
    found = read_tables(text)
    assert found.name("cuda", "cuda") == "cuda_ipc" and found.name("cpu", "cpu") == "cma"


def test_silence_is_no_answer() -> None:
    found = read_tables("UCX  ERROR   no such device")
    assert not found.paths and "no such device" in found.failure
