"""The reference engine: requests, chunks and batches over one rank's stage."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from sglang_pd.engines.base import DecodeItem, HandoffRecord, ModelFacts, Output, PrefillChunk, Request, own_ids
from sglang_pd.engines.claims import require_distinct, require_same_lease
from sglang_pd.engines.reference.config import MAX_TOKENS, ReferenceConfig, state_spec
from sglang_pd.engines.reference.grid import linear, rms
from sglang_pd.engines.reference.links import Links
from sglang_pd.engines.reference.stage import Stage
from sglang_pd.engines.reference.step import Sequence, StepBuilder
from sglang_pd.engines.reference.weights import Cut, Weights, build
from sglang_pd.engines.sampling import choose, logprobs
from sglang_pd.memory.lease import Tables
from sglang_pd.memory.pools import RankPools
from sglang_pd.memory.spec import StateSpec
from sglang_pd.protocol.errors import ConfigError, RoomError
from sglang_pd.protocol.manifest import RankId, Topology

DELTA_TOKENS = 4
"""Leading tokens that decide a request's coordinates: fewer than a page, so that requests with equal pages agree."""


def position_delta(token_ids: NDArray[np.int64]) -> tuple[int, int, int]:
    """Offsets of the three coordinate axes, from the prompt's beginning: requests differ, and every run agrees."""
    start = np.ascontiguousarray(token_ids[:DELTA_TOKENS], dtype="<i8")
    digest = xxhash.xxh3_64_intdigest(start.tobytes())
    return digest % 61, digest // 61 % 59, digest // 3599 % 53


class ReferenceEngine:
    """Implements `engines.base.Engine`. Between calls it keeps, of a request, only what the handoff record carries."""

    def __init__(
        self,
        config: ReferenceConfig,
        topology: Topology | None = None,
        rank: RankId | None = None,
        links: Links | None = None,
        stage_starts: tuple[int, ...] = (),
        device: str = "cpu",
    ) -> None:
        self.config = config
        self.topology, self.rank = topology or Topology(), rank or RankId(0, 0)
        self._links, self._device = links or Links(), device
        self._state = state_spec(config, stage_starts)
        self._check_topology()
        self._layers = self._state.stage_layers(self.topology, self.rank.pp_rank)
        self._cut = Cut(self.topology.tp, self.rank.tp_rank, self.topology.dcp)
        self._weights: Weights = build(config, self._layers, self._cut, device)
        self._stage: Stage | None = None
        self._builder: StepBuilder | None = None
        self._sequences: dict[str, Sequence] = {}
        self._scores: dict[str, list[float]] = {}
        """Of prompts that are scored: log-probabilities of their tokens so far, from the second on."""

    def _check_topology(self) -> None:
        c, tp = self.config, self.topology.tp
        cut = {"heads": c.heads, "mlp": c.mlp, "gdn_key_heads": c.gdn_key_heads if c.layers_of("gdn") else tp}
        for field, units in cut.items():
            if units % tp:
                raise ConfigError(
                    "the model cannot be cut over these ranks", where=f"engine.{field}",
                    expected=f"a multiple of tp = {tp}", actual=units,
                )  # fmt: skip

    # --- Engine ---

    def describe(self) -> ModelFacts:
        """See `Engine`."""
        c = self.config
        return ModelFacts(c.fingerprint, self._state, MAX_TOKENS, c.vocab, c.eos, c.page_multiple)

    @property
    def state(self) -> StateSpec:
        """The model's state, to lay out pools for."""
        return self._state

    def attach(self, pools: RankPools) -> None:
        """See `Engine`."""
        if (pools.layout.topology, pools.layout.rank) != (self.topology, self.rank):
            raise ConfigError(
                "pools of another rank", where="engine.attach", expected=f"{self.topology} {self.rank}",
                actual=f"{pools.layout.topology} {pools.layout.rank}",
            )  # fmt: skip
        self._pools = pools
        self._stage = Stage(self.config, self._weights, self._cut, self._links, pools)
        self._builder = StepBuilder(self.config, pools.layout, self._device)
        self._sequences.clear()
        self._scores.clear()

    def start(self, request: Request, tables: Tables) -> None:
        """See `Engine`."""
        where = f"request {request.request_id}"
        ids = own_ids(request.token_ids, where)
        if not ids.size:
            raise RoomError("a request has at least one token", code="prompt_empty", where=where)
        if ids.size >= MAX_TOKENS:
            raise RoomError(
                "the request can never fit", code="prompt_too_long", where=where, expected=f"below {MAX_TOKENS}",
                actual=ids.size,
            )  # fmt: skip
        if int(ids.min()) < 0 or int(ids.max()) >= self.config.vocab:
            raise RoomError("a token outside the vocabulary", code="request_rejected", where=where)
        if request.request_id in self._sequences:
            raise RoomError("that request is known already", code="request_rejected", where=where)
        self._pools.reset(tables)
        if request.score:
            self._scores[request.request_id] = []
        self._sequences[request.request_id] = Sequence(
            request.request_id, position_delta(ids), request.sampling, tables, prompt=ids
        )

    def prefill(self, chunk: PrefillChunk) -> Output | None:
        """See `Engine`."""
        sequence = self._known(chunk.request_id)
        prompt = sequence.prompt
        if prompt is None or chunk.start != sequence.tokens or not chunk.start < chunk.stop <= len(prompt):
            raise RoomError(
                "a chunk continues where the last one stopped", code="request_rejected", where=chunk.request_id,
                expected=f"start {sequence.tokens}, stop up to {0 if prompt is None else len(prompt)}",
                actual=f"[{chunk.start}, {chunk.stop})",
            )  # fmt: skip
        self._claim(sequence, chunk.tables)
        sequence.tables = chunk.tables
        ids = prompt[chunk.start : chunk.stop].copy()
        every = self._forward([sequence], ids[None], every=chunk.request_id in self._scores)
        sequence.digest.add(ids)
        if every is None:
            return None
        if chunk.request_id in self._scores:
            following = prompt[chunk.start + 1 : chunk.stop + 1]
            rows = zip(every[0], following.tolist(), strict=False)  # row by row: sums then do not depend on the chunk
            self._scores[chunk.request_id] += [float(logprobs(row)[token]) for row, token in rows]
        if chunk.stop < len(prompt):
            return None
        output = self._sampled(sequence, every[0, -1])
        sequence.first = (output.token, output.logprob)
        return output

    def prompt_logprobs(self, request_id: str) -> NDArray[np.float64]:
        """See `PromptScorer`."""
        sequence = self._known(request_id)
        if sequence.first is None or request_id not in self._scores:
            raise RoomError("the prompt is not scored here", code="request_rejected", where=request_id)
        return np.array(self._scores[request_id], dtype=np.float64)

    def handoff(self, request_id: str) -> HandoffRecord:
        """See `Engine`."""
        sequence = self._known(request_id)
        if sequence.first is None or sequence.drawn != 1:
            raise RoomError("the prompt is not prefilled here", code="request_rejected", where=request_id)
        return HandoffRecord(
            model=self.config.fingerprint,
            prompt_tokens=sequence.tokens,
            prompt_digest=sequence.digest.value,
            first_token=sequence.first[0],
            first_logprob=sequence.first[1],
            sampling=sequence.sampling,
            sampled=sequence.drawn,
            position_delta=sequence.delta,
        )

    def admit(self, request_id: str, record: HandoffRecord, tables: Tables) -> None:
        """See `Engine`."""
        if request_id in self._sequences:
            raise RoomError("that request is known already", code="request_rejected", where=request_id)
        if record.model != self.config.fingerprint or len(record.position_delta) != 3:
            raise RoomError(
                "the record belongs to another model", code="request_rejected", where=request_id,
                expected=self.config.fingerprint, actual=record.model,
            )  # fmt: skip
        if not 0 <= record.first_token < self.config.vocab or record.prompt_tokens >= MAX_TOKENS:
            raise RoomError("the record is not possible", code="request_rejected", where=request_id)
        self._pools.take(tables)
        a, b, c = record.position_delta
        self._sequences[request_id] = Sequence(
            request_id, (a, b, c), record.sampling, tables, tokens=record.prompt_tokens, drawn=record.sampled
        )

    def decode(self, batch: SequenceOf[DecodeItem]) -> list[Output] | None:
        """See `Engine`."""
        sequences = [self._known(item.request_id) for item in batch]
        require_distinct(batch)
        for sequence, item in zip(sequences, batch, strict=True):
            self._claim(sequence, item.tables)
        for sequence, item in zip(sequences, batch, strict=True):
            sequence.tables = item.tables
            if sequence.tokens >= MAX_TOKENS:
                raise RoomError("the sequence is at its longest", code="prompt_too_long", where=item.request_id)
        logits = self._forward(sequences, np.array([[item.token] for item in batch], dtype=np.int64))
        if logits is None:
            return None
        return [self._sampled(sequence, row[-1]) for sequence, row in zip(sequences, logits, strict=True)]

    def release(self, request_id: str) -> None:
        """See `Engine`."""
        self._sequences.pop(request_id, None)
        self._scores.pop(request_id, None)

    # --- inside ---

    def _known(self, request_id: str) -> Sequence:
        if request_id not in self._sequences:
            raise RoomError("no such request in this engine", code="request_rejected", where=request_id)
        return self._sequences[request_id]

    def _claim(self, sequence: Sequence, tables: Tables) -> None:
        """Refuse tables that are not of the memory where this request's state lies."""
        require_same_lease(sequence.request_id, sequence.tables, tables)
        self._pools.take(tables)

    def _sampled(self, sequence: Sequence, logits: NDArray[np.float64]) -> Output:
        token, logprob = choose(logits, sequence.sampling, sequence.drawn)
        sequence.drawn += 1
        return Output(sequence.request_id, token, logprob, logits)

    def _forward(
        self, sequences: list[Sequence], ids: NDArray[np.int64], *, every: bool = False
    ) -> NDArray[np.float64] | None:
        """One step of this stage; on the last one float64 [B, T, vocab], logits of every new token, or with T = 1 of
        the last one."""
        if self._stage is None or self._builder is None:
            raise ConfigError("the engine has no pools", where="engine.attach")
        with torch.inference_mode():
            step = self._builder.build(sequences, ids)
            if self.rank.pp_rank == 0:
                x = self._weights.embedding[step.ids]
            else:
                x = self._links.recv((step.batch, step.count, self.config.hidden))
            x = self._stage.run(x, step)
            for sequence in sequences:
                sequence.tokens += step.count
            if self.rank.pp_rank < self.topology.pp - 1:
                self._links.send(x)
                return None
            result: NDArray[np.float64] = linear(rms(x if every else x[:, -1:]), self._weights.head).cpu().numpy()
            return result
