"""The first seed's defects do not type-check: one run of mypy over a folder of snippets, good ones and bad ones.

A bad line ends in `# error: CODE`; mypy must complain about those lines, with those codes, and about no other.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HEAD = """\
from typing import Any
import numpy as np
from sglang_pd.protocol.idx import Idx, MaskedIdx
from sglang_pd.protocol.manifest import Region
from sglang_pd.protocol.space_maps import DivideGroups, Door, Identity, Localize, PageOf, RingAt, TokenAt
from sglang_pd.protocol.spaces import LocalTok, Page, RequestRow, Ring, Scaled, SwaTok, VirtualTok

virtual = VirtualTok(capacity_tokens=100, page_tokens=4, dcp_size=4)
local = LocalTok(virtual=virtual, dcp_rank=1)
row = RequestRow(rows=3)
out_cache_loc = virtual.ingest([9, 10])
pages = Page(of=virtual).ingest([1])
index_k = Door(virtual, "index-K")
c_kv = Door(local, "c-KV")
"""

SNIPPETS = {
    "good": """\
index_k.accept(Identity(virtual)(out_cache_loc))
c_kv.accept(Localize(virtual, 1)(out_cache_loc).idx)
c_kv.accept_masked(Localize(virtual, 1).masked(out_cache_loc))
Door(Scaled(of=virtual, ratio=2), "compressed").accept(DivideGroups(Scaled(of=virtual, ratio=2))(out_cache_loc))
Door(Page(of=virtual), "pages").accept(PageOf(virtual)(out_cache_loc))
index_k.accept(TokenAt(virtual)(pages, np.array([0, 1])))
RingAt(Ring(of=row, width=4, group_tokens=4))(row.ingest([1]), np.array([5]))
""",
    "defect_1_index_k_sized_by_another_pool": """\
def rows(**facts: int) -> Region:
    return Region(
        layer_id=0, part="key", dtype="u8", item_bytes=132, stride_bytes=132, row_bytes=132, unit_bytes=132,
        units_total=1, dim=0, segment=0, offset=0, index_buf_size=facts["size"],
    )  # error-of-call: call-arg
VirtualTok(page_tokens=4, dcp_size=4)  # error: call-arg
virtual.extent = 100  # error: misc
Door(virtual, "index-K", size=100)  # error: call-arg
""",
    "defect_2_virtual_slot_in_a_local_cache": """\
c_kv.accept(out_cache_loc)  # error: arg-type
def write_norope(loc: Idx[LocalTok]) -> None: ...
write_norope(out_cache_loc)  # error: arg-type
def read(table: MaskedIdx[LocalTok]) -> None: ...
read(virtual.ingest_masked([9, -1]))  # error: arg-type
c_kv.accept_masked(virtual.ingest_masked([9, -1]))  # error: arg-type
""",
    "dividing_alone_or_filtering_alone": """\
out_cache_loc // 4  # error: operator
out_cache_loc % 4 == 1  # error: operator
out_cache_loc + 1  # error: operator
out_cache_loc[0]  # error: index
int(out_cache_loc)  # error: call-overload
""",
    "a_masked_index_at_a_writer": """\
c_kv.accept(Localize(virtual, 1).masked(out_cache_loc))  # error: arg-type
index_k.accept(virtual.ingest_masked([3, -1]))  # error: arg-type
""",
    "bare_integers": """\
c_kv.accept(np.array([1, 2]))  # error: arg-type
index_k.accept([1, 2])  # error: arg-type
Localize(virtual, 1)(np.array([1, 2]))  # error: arg-type
PageOf(virtual)(np.array([1]))  # error: arg-type
""",
    "localised_once_more": """\
mine = Localize(virtual, 1)(out_cache_loc).idx
Localize(virtual, 1)(mine)  # error: arg-type
index_k.accept(mine)  # error: arg-type
PageOf(virtual)(mine)  # error: arg-type
""",
    "units_confused": """\
swa = SwaTok(capacity_tokens=8, page_tokens=4, window_tokens=3)
index_k.accept(pages)  # error: arg-type
index_k.accept(swa.ingest([5]))  # error: arg-type
index_k.accept(row.ingest([1]))  # error: arg-type
TokenAt(virtual)(out_cache_loc, np.array([0]))  # error: arg-type
RingAt(Ring(of=row, width=4, group_tokens=4))(pages, np.array([5]))  # error: arg-type
Scaled(of=local, ratio=2)  # error: arg-type
""",
}
MARK = re.compile(r"# error: ([\w-]+)")
CALL = re.compile(r"# error-of-call: ([\w-]+)")


def expected_errors(text: str) -> set[tuple[int, str]]:
    """(line, code) of every marked line; for a call over several lines, of its first."""
    found: set[tuple[int, str]] = set()
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if mark := MARK.search(line):
            found.add((number, mark[1]))
        if mark := CALL.search(line):
            first = max(n for n in range(number) if "return Region(" in lines[n]) + 1
            found.add((first, mark[1]))
    return found


@pytest.fixture(scope="module")
def complaints(
    tmp_path_factory: pytest.TempPathFactory, package_tree: Path, repository: Path
) -> dict[str, set[tuple[int, str]]]:
    """What mypy says about each snippet: (line, code)."""
    folder = tmp_path_factory.mktemp("snippets")
    for name, body in SNIPPETS.items():
        (folder / f"{name}.py").write_text(HEAD + body)
    # The cache outlives the run: without it the stubs of numpy take longer than all other tests together.
    cache = repository / ".mypy_cache" / "snippets"
    # Errors inside the package are lint's business: here only the snippets are asked about.
    options = ["--strict", "--config-file=", "--no-pretty", "--follow-imports=silent", "--cache-dir", str(cache)]
    command = [sys.executable, "-m", "mypy", *options, "."]
    environment = {**os.environ, "MYPYPATH": str(package_tree)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    said: dict[str, set[tuple[int, str]]] = {name: set() for name in SNIPPETS}
    for line in done.stdout.splitlines():
        if found := re.match(r"(\w+)\.py:(\d+): error: .*\[([\w-]+)\]$", line):
            said[found[1]].add((int(found[2]), found[3]))
        else:
            assert ": note:" in line or line.startswith(("Found", "Success")), line
    return said


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SNIPPETS)
def test_mypy_complains_about_exactly_the_marked_lines(name: str, complaints: dict[str, set[tuple[int, str]]]) -> None:
    want = expected_errors(HEAD + SNIPPETS[name])
    assert complaints[name] == want
    assert bool(want) == (name != "good")
