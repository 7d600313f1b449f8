"""`sglang-pd explain`: where the pools' memory goes, and which rank writes which bytes to which."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np
import typer

from sglang_pd.cli.app import EXIT_NO
from sglang_pd.cli.check import differences, judge, load_pair
from sglang_pd.cli.output import JsonOption, SetOption, emit, emit_json, split_sets, table
from sglang_pd.config import load_worker
from sglang_pd.protocol.bind import Chunk, IndexLists, bind
from sglang_pd.protocol.errors import ConfigError, RoomError
from sglang_pd.protocol.kinds import Prompt, list_count
from sglang_pd.protocol.pairing import Pairing
from sglang_pd.protocol.plan import Plan, region_numbers
from sglang_pd.protocol.spaces import AnySpace
from sglang_pd.worker.serving.instances import Planned, plan_instance

DEFAULT_PROMPT_TOKENS = 1000
POOL_COLUMNS = ("component", "device", "space", "extent", "regions", "bytes", "note")
PLAN_COLUMNS = ("writer", "into", "component", "layers", "bytes a row", "bytes", "pieces")

DecodeArgument = Annotated[str, typer.Argument(metavar="[DECODE]", help="With it, the plan of the pair is shown too.")]
TokensOption = Annotated[int, typer.Option("--tokens", min=0, help="Prompt length; 0: 1000, or what fits.")]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What one source rank writes into one destination rank for one component and one prompt.

    row_bytes: bytes of one token, group or state over all layers. nbytes, pieces: for the whole prompt; none for a rank
    that another one stands in for.
    """

    writer: str
    into: str
    component: str
    layers: int
    row_bytes: int
    nbytes: int
    pieces: int


def command(
    config: str,
    decode: DecodeArgument = "",
    tokens: TokensOption = 0,
    sets: SetOption = [],  # noqa: B006
    as_json: JsonOption = False,
) -> int:
    """The pools' memory, and with two configurations (prefill, decode) who writes which bytes per component."""
    if not decode:
        return _explain_one(plan_instance(load_worker(config, sets=sets)), tokens, as_json=as_json)
    planned = [plan_instance(side) for side in load_pair(config, decode, split_sets(sets))]
    verdict = judge(planned[0], planned[1])
    rows: list[Row] = []
    if verdict.accepted:
        for p in planned:
            require_fits(p, tokens)
        tokens = tokens or min(DEFAULT_PROMPT_TOKENS, *(p.manifest.max_tokens for p in planned))
        rows = plan_rows(Pairing(planned[0].manifest, planned[1].manifest), tokens)
    if as_json:
        emit_json(
            {
                "accepted": verdict.accepted,
                "mismatches": verdict.mismatches,
                "pools": [pools_payload(p) for p in planned],
                "tokens": tokens if verdict.accepted else None,
                "plan": rows,
            }
        )
        return 0 if verdict.accepted else EXIT_NO
    for p in planned:
        emit(*_pools(p), "")
    if not verdict.accepted:
        emit("refused: there is no plan", differences(verdict))
        return EXIT_NO
    emit(*_plan(rows, tokens))
    return 0


def _explain_one(planned: Planned, tokens: int, *, as_json: bool) -> int:
    require_fits(planned, tokens)
    if as_json:
        emit_json({"pools": [pools_payload(planned)], "tokens": None, "plan": []})
    else:
        emit(*_pools(planned), "")
    return 0


def require_fits(planned: Planned, tokens: int) -> None:
    """Raise `RoomError` (`prompt_too_long`) for a prompt that the worker of this configuration would refuse."""
    longest = planned.manifest.max_tokens
    if tokens > longest:
        raise RoomError(
            "the prompt can never fit",
            code="prompt_too_long",
            where="--tokens",
            expected=f"at most {longest:,} tokens at {planned.manifest.instance_id} ({planned.config.role})",
            actual=f"{tokens:,} tokens",
            hint="The model, the pools and limits.max_prompt_tokens bound it.",
        )


def plan_rows(pairing: Pairing, tokens: int) -> list[Row]:
    """Every rank pair's writes for one prompt of `tokens`. Raises `ConfigError` where the pools cannot hold it."""
    prompt = Prompt(tokens)
    src, dst = (_lists(needed, prompt) for needed in (pairing.needed.src, pairing.needed.dst))
    room = pairing.room(prompt, src, dst)
    rows: list[Row] = []
    for src_rank, dst_rank, plan in pairing.all_plans():
        batch = bind(plan, room, Chunk(0, tokens, True))
        moved = _by_kind(plan, pairing, batch.dst_region, batch.length)
        for kind in sorted({move.kind for move in plan.moves if len(move)}):
            moves = [move for move in plan.moves if move.kind == kind]
            nbytes, pieces = moved.get(kind, (0, 0))
            rows.append(
                Row(
                    writer=str(src_rank),
                    into=str(dst_rank),
                    component=kind,
                    layers=len({int(layer) for move in moves for layer in move.layer_id}),
                    row_bytes=sum(int(move.length.sum()) for move in moves),
                    nbytes=nbytes,
                    pieces=pieces,
                )
            )
    return rows


def _lists(needed: Any, prompt: Prompt) -> IndexLists:
    """The lowest free units of every list space, as a fresh allocator would lease them."""
    lists: dict[AnySpace, Any] = {}
    for space in needed:
        count = list_count(space, prompt)
        if space.reserve + count > space.extent:
            raise ConfigError(
                "the prompt does not fit into the pools",
                where="--tokens",
                expected=f"at most {space.extent - space.reserve:,} units of {type(space).__name__}",
                actual=f"{count:,} units for {prompt.tokens:,} tokens",
            )
        lists[space] = space.ingest(np.arange(space.reserve, space.reserve + count, dtype=np.int64))
    return lists


def _by_kind(plan: Plan, pairing: Pairing, dst_region: Any, length: Any) -> dict[str, tuple[int, int]]:
    numbers = region_numbers(pairing.decode.rank(plan.dst_rank))
    found: dict[str, tuple[int, int]] = {}
    for kind, regions in numbers.items():
        mine = np.isin(dst_region, np.array([number for number, _ in regions.values()], np.uint32))
        if bool(mine.any()):
            found[kind] = int(length[mine].sum()), int(mine.sum())
    return found


def pools_payload(planned: Planned) -> dict[str, Any]:
    """Sizes and bytes of one instance's pools, of its fullest rank."""
    budget = planned.budget
    return {
        "instance": planned.manifest.instance_id,
        "role": planned.config.role,
        "capacity": budget.capacity,
        "max_tokens": planned.manifest.max_tokens,
        "components": budget.lines,
        "used_bytes": dict(budget.used_bytes),
        "memory_bytes": dict(budget.memory_bytes),
    }


def _pools(planned: Planned) -> list[Any]:
    budget = planned.budget
    rows: list[list[object]] = [
        [x.kind, x.device, x.space, x.extent, x.regions, x.nbytes, x.note] for x in budget.lines
    ]
    for device, used in sorted(budget.used_bytes.items()):
        have = budget.memory_bytes[device]
        given = "" if planned.config.pools.memory_bytes is None else f"of {have:,} ({100 * used / have:.1f} %)"
        rows.append(["total", device, "", "", "", used, given])
    t = planned.manifest.topology
    title = f"{planned.manifest.instance_id}: pools of one rank (the fullest of pp{t.pp} tp{t.tp} dcp{t.dcp})"
    c = budget.capacity
    sizes = f"{c.tokens:,} tokens, {c.rows} rows, {c.slots} slots, pages of {c.page_tokens}"
    return [
        table(title, POOL_COLUMNS, rows, ("extent", "regions", "bytes")),
        f"{sizes}; longest prompt {planned.manifest.max_tokens:,} tokens",
    ]


def _plan(rows: list[Row], tokens: int) -> list[Any]:
    cells = [[r.writer, r.into, r.component, r.layers, r.row_bytes, r.nbytes, r.pieces] for r in rows]
    totals: dict[str, int] = {}
    for r in rows:
        totals[r.component] = totals.get(r.component, 0) + r.nbytes
    summary = [[kind, nbytes] for kind, nbytes in sorted(totals.items())] + [["all", sum(totals.values())]]
    return [
        table(f"writes for a prompt of {tokens:,} tokens", PLAN_COLUMNS, cells, PLAN_COLUMNS[3:]),
        "",
        table("over all ranks", ("component", "bytes"), summary, ("bytes",)),
    ]
