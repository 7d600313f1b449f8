"""Write the generated parts of docs/protocol.md from the code: `python scripts/gen_protocol_docs.py [--check]`.

A part stands between `<!-- generated: NAME -->` and `<!-- end -->`. --check changes nothing and fails when one is old.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import msgspec.inspect as mi
import numpy as np

from sglang_pd.protocol import codec, kinds, manifest, messages, placement, room, spaces, version
from sglang_pd.protocol.errors import ErrorInfo
from sglang_pd.protocol.indices import IndexList
from sglang_pd.protocol.space_maps import local_address

PAGE = Path(__file__).resolve().parent.parent / "docs" / "protocol.md"
PART = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    names = list(head)
    lines = [names, ["---"] * len(names), *[[str(cell) for cell in row] for row in rows]]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


# --- wire types ------------------------------------------------------------------------------------------------------

POWERS = {2**n - 1: f"2^{n} - 1" for n in (16, 31, 32, 63, 64)} | {2**n: f"2^{n}" for n in range(10, 64)}


def number(value: float | int) -> str:
    return POWERS.get(int(value), f"{value:,}".replace(",", " "))


def bounded(name: str, low: int | None, high: int | None, unit: str) -> str:
    if low and high is not None:
        return f"{name}, {number(low)} to {number(high)} {unit}".rstrip()
    return f"{name}, at most {number(high)} {unit}".rstrip() if high is not None else name


def wire_type(kind: mi.Type) -> str:
    if isinstance(kind, mi.IntType):
        if kind.ge is None:
            return "int (bounds: see the text)"
        high = number(kind.le) if kind.le is not None else "2^64 - 1"
        return f"int, {number(kind.ge)} to {high}"
    if isinstance(kind, mi.StrType):
        return bounded("str", kind.min_length, kind.max_length, "characters")
    if isinstance(kind, mi.BytesType):
        return bounded("bin", kind.min_length, kind.max_length, "bytes")
    if isinstance(kind, mi.VarTupleType):
        return bounded(f"array of ({wire_type(kind.item_type)})", kind.min_length, kind.max_length, "")
    if isinstance(kind, mi.TupleType):
        return "array of [" + ", ".join(wire_type(item) for item in kind.item_types) + "]"
    if isinstance(kind, mi.DictType):
        inner = f"map of ({wire_type(kind.key_type)}) to ({wire_type(kind.value_type)})"
        return bounded(inner, kind.min_length, kind.max_length, "entries")
    if isinstance(kind, mi.StructType):
        return f"`{kind.cls.__name__}`"
    if isinstance(kind, mi.LiteralType):
        return " or ".join(f'"{value}"' for value in kind.values)
    if isinstance(kind, mi.UnionType):
        return " or ".join(wire_type(part) for part in kind.types)
    return {mi.BoolType: "bool", mi.NoneType: "nil"}[type(kind)]


def default(field: mi.Field) -> str:
    if field.required:
        return "required"
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    if isinstance(value, str):
        return f'"{value}"'
    if value is None or isinstance(value, bool):
        return {None: "nil", True: "true", False: "false"}[value]
    if isinstance(value, bytes | dict) or value == ():
        return "empty"
    return number(value) if isinstance(value, int) else str(value)


def struct_part(kind: type[msgspec.Struct], title: str) -> str:
    info = mi.type_info(kind)
    assert isinstance(info, mi.StructType)
    text = inspect.cleandoc(kind.__doc__ or "")
    form = "array, in this order" if info.array_like else "map"
    rows = [(f"`{f.encode_name}`", wire_type(f.type), default(f)) for f in info.fields]
    tag = f'Tag: `"{info.tag_field}": "{info.tag}"`.\n\n' if info.tag is not None else ""
    body = table(("field", "type and bounds", "default"), rows) if rows else "No fields.\n"
    return f"{title}\n\n{text}\n\nTravels as a {form}.\n\n{tag}{body}\n"


def part_messages() -> str:
    out = []
    for num, kind in messages.MESSAGES.items():
        since = messages.MESSAGE_SINCE.get(num, 0)
        limit = number(codec.body_limit(num))
        new = f", since 1.{since}" if since else ""
        out.append(struct_part(kind, f"#### {num}: {kind.__name__}\n\nBody at most {limit} bytes{new}."))
    return "\n".join(out)


def part_structs() -> str:
    shared = (messages.Writer, messages.Mismatch, messages.Verdict, IndexList, ErrorInfo)
    return "\n".join(struct_part(kind, f"#### {kind.__name__}") for kind in shared)


def part_numbers() -> str:
    def purpose(kind: type[messages.Message]) -> str:
        return inspect.cleandoc(kind.__doc__ or "").split("\n")[0]

    rows = [(num, f"`{kind.__name__}`", purpose(kind)) for num, kind in messages.MESSAGES.items()]
    return table(("type", "message", "what it says"), rows)


def part_history() -> str:
    return table(("version", "change"), [(str(v), text) for v, text in version.HISTORY])


def part_features() -> str:
    rows = [(bit, name) for bit, name in sorted(version.FEATURES.items())]
    return table(("bit", "feature"), rows) if rows else f"Version {version.PROTOCOL_VERSION} defines no feature bit.\n"


# --- rooms -----------------------------------------------------------------------------------------------------------


def arrows(edges: dict[tuple[str, str], list[str]], start: str) -> str:
    lines = ["```mermaid", "stateDiagram-v2", "    direction TB", f"    [*] --> {start}"]
    for (source, target), labels in edges.items():
        for at in range(0, len(labels), 4):
            lines.append(f"    {source} --> {target}: {', '.join(labels[at : at + 4])}")
    lines += [f"    {state.value} --> [*]" for state in sorted(room.TERMINAL, key=lambda s: s.value) if start == "new"]
    return "\n".join([*lines, "```", ""])


def part_room(role: room.Role) -> str:
    edges: dict[tuple[str, str], list[str]] = defaultdict(list)
    for state, row in room.TABLE[role].items():
        for trigger, target in row.items():
            if state is not target:
                edges[state.value, target.value].append(trigger.label)
    rows = []
    for state, row in room.TABLE[role].items():
        by_target: dict[str, list[str]] = defaultdict(list)
        for trigger, target in row.items():
            by_target[target.value].append(f"{trigger.label}{' *' if trigger.kind is room.Kind.JUDGED else ''}")
        for target_name, labels in by_target.items():
            shown = "(stays)" if target_name == state.value else f"`{target_name}`"
            rows.append((f"`{state.value}`", ", ".join(labels), shown))
    return arrows(edges, "new") + "\n" + table(("in state", "on", "goes to"), rows)


def part_memory() -> str:
    edges: dict[tuple[str, str], list[str]] = defaultdict(list)
    rows = []
    for role, moves in room.JOINT.items():
        for (state, before), after in moves.items():
            edges[before.value, after.value].append(f"{role.value} {state.value}")
            rows.append((role.value, f"`{state.value}`", f"`{before.value}`", f"`{after.value}`"))
    for before, after in room.FENCE.items():
        edges[before.value, after.value].append("every writer is fenced")
    diagram = arrows(edges, room.Memory.UNTOUCHED.value)
    return diagram + "\n" + table(("role", "room enters", "memory was", "memory becomes"), rows)


def part_deadlines() -> str:
    rows = [
        (role.value, f"`{state.value}`", "; ".join(rule.value for rule in rules))
        for role, states in room.DEADLINES.items()
        for state, rules in states.items()
    ]
    rows.append(("both", "an end with quarantined memory", room.Deadline.FENCE_ALARM.value))
    limits = room.Limits()
    durations = [(f"`{name}`", f"{getattr(limits, name):g} s") for name in limits.__dataclass_fields__]
    return table(("role", "state", "bounded by"), rows) + "\n" + table(("duration", "default"), durations)


# --- spaces, kinds, manifest, planning -------------------------------------------------------------------------------


def part_spaces() -> str:
    found = [
        spaces.VirtualTok, spaces.LocalTok, spaces.SwaTok, spaces.RequestRow, spaces.RecurrentSlot, spaces.Page,
        spaces.Scaled, spaces.Ring, spaces.RaggedScratch,
    ]  # fmt: skip
    example = spaces.VirtualTok(capacity_tokens=64, page_tokens=16, dcp_size=2)
    raw = msgspec.msgpack.encode(example)
    shown = f"`{example}` encodes as\n\n    {raw.hex()}\n\nand its digest is `0x{example.digest:08x}`.\n"
    return "\n".join(struct_part(kind, f"#### {kind.__name__}") for kind in found) + "\nExample: " + shown


def part_kinds() -> str:
    def rule(kind: kinds.Kind) -> str:
        return inspect.cleandoc(kind.live.__doc__ or "").split(".")[0]

    def sentinel(kind: kinds.Kind, part: str) -> str:
        return f" (layer id {kind.request_wide[part]})" if part in kind.request_wide else ""

    rows = [
        (
            f"`{kind.name}`",
            kind.summary,
            ", ".join(space.__name__ for space in kind.spaces),
            ", ".join(sorted(place.value for place in kind.placements)),
            {"chunk": "each chunk", "last": "last chunk"}[kind.validity.value],
            rule(kind),
            ", ".join(
                f"{part} ({kind.request_wide[part]})" if part in kind.request_wide else part for part in kind.parts
            ),
            "yes" if kind.optional else "no",
        )
        for kind in kinds.KINDS.values()
    ]
    head = ("kind", "what it is", "spaces", "placement", "valid after", "live elements", "parts (sentinel)", "optional")
    return table(head, rows)


def part_manifest() -> str:
    found = (
        manifest.InstanceManifest, manifest.Topology, manifest.RankManifest, manifest.RankId, manifest.Transport,
        manifest.SegmentInfo, manifest.Component, manifest.Region,
    )  # fmt: skip
    return "\n".join(struct_part(kind, f"#### {kind.__name__}") for kind in found)


def part_intervals() -> str:
    """Worked examples of placement, computed by the code."""
    examples = [
        ("KV, 8 heads of 256 bytes, TP 4 -> 2", (256, (8,), 1, False), 4, 2),
        ("KV, 8 heads of 256 bytes, TP 1 -> 4", (256, (8,), 1, False), 1, 4),
        ("KV, 2 heads (GQA) of 256 bytes, TP 4 -> 1", (256, (2,), 1, False), 4, 1),
        ("KV, 2 heads (GQA) of 256 bytes, TP 1 -> 4", (256, (2,), 1, False), 1, 4),
        ("KV, 6 heads of 256 bytes, TP 3 -> 2", (256, (6,), 1, False), 3, 2),
        ("conv, groups 4, 4, 8 of 2 bytes, TP 4 -> 2", (2, (4, 4, 8), 1, False), 4, 2),
        ("conv, groups 4, 4, 8 of 2 bytes, outer 3, TP 2 -> 1", (2, (4, 4, 8), 3, False), 2, 1),
        ("replicated row of 512 bytes, TP 3 -> 2", (512, (1,), 1, True), 3, 2),
    ]  # fmt: skip
    rows = []
    for title, (unit_bytes, groups, outer, replicated), src_tp, dst_tp in examples:
        geometry = placement.RowGeometry(unit_bytes, groups, outer, replicated)
        for dst in range(dst_tp):
            for src in range(src_tp):
                found = placement.intervals(geometry, placement.Shard(src_tp, src), placement.Shard(dst_tp, dst))
                if found:
                    moved = "; ".join(f"{i.src_offset_bytes} -> {i.dst_offset_bytes} x {i.length_bytes}" for i in found)
                    rows.append((title, f"{src} -> {dst}", moved))
                    title = ""
    return table(("item", "ranks", "bytes of a row: source offset -> destination offset x length"), rows)


def part_context() -> str:
    """Worked example of a destination that shards its context."""
    virtual = spaces.VirtualTok(capacity_tokens=64, page_tokens=4, dcp_size=2)
    prompt, pages = kinds.Prompt(19, 8), [5, 2]
    listed = virtual.list_space
    assert kinds.list_count(listed, prompt) == len(pages)
    rows = []
    for position in (8, 9, 10, 15, 16, 18):
        place = position // virtual.page_len - kinds.first_page(listed, prompt)
        slot = pages[place] * virtual.page_len + position % virtual.page_len
        owner, local = local_address(np.array([slot]), virtual)
        rows.append((position, f"pages[{place}] = {pages[place]}", slot, int(owner[0]), int(local[0])))
    return table(("token position", "page", "virtual slot", "owner rank", "local slot"), rows)


PARTS: dict[str, Callable[[], str]] = {
    "history": part_history,
    "features": part_features,
    "numbers": part_numbers,
    "messages": part_messages,
    "structs": part_structs,
    "room-prefill": lambda: part_room(room.Role.PREFILL),
    "room-decode": lambda: part_room(room.Role.DECODE),
    "memory": part_memory,
    "deadlines": part_deadlines,
    "spaces": part_spaces,
    "kinds": part_kinds,
    "manifest": part_manifest,
    "intervals": part_intervals,
    "context": part_context,
}


def render(text: str) -> str:
    """The page with every generated part as it should be. Raises KeyError for a part nobody makes."""
    return PART.sub(lambda found: found[1] + "\n" + PARTS[found[2]]().rstrip() + "\n\n" + found[3], text)


def main() -> int:
    old = PAGE.read_text(encoding="utf-8")
    new = render(old)
    if "--check" in sys.argv[1:]:
        if old != new:
            print("docs/protocol.md is old; run: python scripts/gen_protocol_docs.py", file=sys.stderr)
        return int(old != new)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
