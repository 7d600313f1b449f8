"""docs/protocol.md: its generated parts are current, and its prose agrees with the code where a number can be wrong."""

from __future__ import annotations

import base64
import importlib.util
import re
import struct
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
import xxhash

from sglang_pd.protocol import codec
from sglang_pd.protocol.messages import MESSAGES, RANK_TYPES
from sglang_pd.protocol.room import State, Trigger
from sglang_pd.protocol.tickets import Ticket, encode_ticket

ROOT = Path(__file__).resolve().parent.parent.parent
TEXT = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gen_protocol_docs", ROOT / "scripts" / "gen_protocol_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_parts_are_current(generator: ModuleType) -> None:
    assert generator.render(TEXT) == TEXT, "run: python scripts/gen_protocol_docs.py"
    used = re.findall(r"<!-- generated: (\S+) -->", TEXT)
    assert sorted(used) == sorted(generator.PARTS), "every part stands on the page once"
    assert TEXT.count("<!-- end -->") == len(used)


def test_a_stale_part_is_seen(generator: ModuleType) -> None:
    assert generator.render(TEXT.replace("`computed_unclaimed`", "`unclaimed`")) != TEXT.replace(
        "`computed_unclaimed`", "`unclaimed`"
    )


def test_every_state_trigger_and_message_is_on_the_page() -> None:
    for state in State:
        assert state.value in TEXT
    for trigger in Trigger:
        assert trigger.label in TEXT
    for kind in MESSAGES.values():
        assert f"`{kind.__name__}`" in TEXT


def test_the_envelope_table_is_the_layout() -> None:
    rows = re.findall(r"^\| (\d+) \| (\d+) \| ", TEXT, re.MULTILINE)
    sizes = [(int(offset), int(size)) for offset, size in rows[:11]]
    assert [offset for offset, _ in sizes] == [sum(size for _, size in sizes[:n]) for n in range(11)]
    assert sum(size for _, size in sizes) == codec.HEADER_BYTES == struct.calcsize("<4sHHHBBIQQQQ")


def test_numbers_in_the_prose() -> None:
    assert f"Types {RANK_TYPES.start} to {RANK_TYPES.stop - 1} are kept" in TEXT
    assert f"at most {codec.MAX_FIELDS} entries a map" in TEXT


def test_a_ticket_is_what_the_page_says() -> None:
    body = msgspec.msgpack.encode(["prefill-0", 7, 9])
    text = base64.urlsafe_b64encode(body + xxhash.xxh3_64(body).digest()).rstrip(b"=").decode()
    assert encode_ticket(Ticket("prefill-0", 7, 9)) == text
    assert xxhash.xxh3_64(body).digest() == xxhash.xxh3_64_intdigest(body).to_bytes(8, "big")


def test_links_lead_to_headings() -> None:
    anchors = {
        re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")
        for title in re.findall(r"^#+ (.+)$", TEXT, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= anchors
