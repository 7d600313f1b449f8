"""The Hugging Face engine: requests, chunks and batches over one rank's pools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import torch
from msgspec import Meta
from numpy.typing import NDArray

from sglang_pd.engines.base import (
    DecodeItem,
    HandoffRecord,
    ModelFacts,
    Output,
    PrefillChunk,
    Request,
    Sampling,
    own_ids,
)
from sglang_pd.engines.claims import require_distinct, require_same_lease
from sglang_pd.engines.devices import require_device
from sglang_pd.engines.sampling import choose, logprobs
from sglang_pd.engines.transformers.describe import facts_of, probe
from sglang_pd.engines.transformers.model import Source, find
from sglang_pd.engines.transformers.mover import Mover, Span
from sglang_pd.engines.transformers.options import WHERE, Options, read
from sglang_pd.engines.transformers.run import forward
from sglang_pd.engines.transformers.selfcheck import Manners, SelfCheck
from sglang_pd.engines.transformers.walk import Walk, name_of, numbers
from sglang_pd.memory.lease import Tables
from sglang_pd.memory.pools import RankPools
from sglang_pd.memory.spec import StateSpec
from sglang_pd.protocol.errors import ConfigError, PdError, RoomError
from sglang_pd.protocol.indices import PromptDigest
from sglang_pd.protocol.manifest import RankId, Topology

MAX_SCALARS: Final = 16_384


class Extra(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the caches count, in the order of the walk (which the fingerprint covers)."""

    scalars: Annotated[list[int | bool], Meta(max_length=MAX_SCALARS)]


_extra_decoder = msgspec.msgpack.Decoder(Extra)


@dataclass
class Running:
    """What the engine keeps of a request between calls: facts of the handoff record, and where its state is.

    scores: log-probabilities of the prompt's tokens so far, from the second on, where they are wanted. digest: of the
    prompt's ids that were computed here.
    """

    request_id: str
    sampling: Sampling
    tables: Tables
    tokens: int = 0
    drawn: int = 0
    prompt: NDArray[np.int64] | None = None
    first: tuple[int, float] | None = None
    extra: bytes = b""
    scores: list[float] | None = None
    digest: PromptDigest = field(default_factory=PromptDigest)

    @property
    def span(self) -> Span:
        """All that is in the pools."""
        return Span(self.tables, self.tokens, self.tokens)


class TransformersEngine:
    """Implements `engines.base.Engine` with a model of the library, one rank.

    The pools are the truth: each step ends with the new state in them, and a cache is never more than their copy. One
    that is not at hand (a request that arrived, another grouping of a batch) is built from the pools alone.
    """

    def __init__(self, options: Mapping[str, Any] | Options, device: str = "cpu") -> None:
        """device: of the pools; the model computes there too, unless the options name another.

        Raises `ConfigError` for impossible options, `ManifestError` for state that cannot be carried.
        """
        self.options = read(options)
        self.source: Source = find(self.options)
        self.device = _device(self.options.device or device)
        self.model = self.source.model(self.device)
        self.walk: Walk = probe(self.source, self.model, self.device)
        self._facts = facts_of(self.source, self.walk)
        self._mover: Mover | None = None
        self._running: dict[str, Running] = {}
        self._caches: dict[tuple[str, ...], Any] = {}
        self.manners = Manners(continues=True, pads=True, batches=True)
        if self.options.self_check:
            self.manners = SelfCheck(self.source, self.model, self.walk, self._facts.state).run()
        if self.options.decode_batch > 1 and not self.manners.batches:
            raise ConfigError(
                "this model gives other logits in a batch", where=f"{WHERE}.decode_batch", expected=1,
                actual=self.options.decode_batch,
            )  # fmt: skip

    # --- Engine ---

    def describe(self) -> ModelFacts:
        """See `Engine`."""
        return self._facts

    @property
    def state(self) -> StateSpec:
        """The model's state, to lay out pools for."""
        return self._facts.state

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Every end-of-sequence token of the model; `ModelFacts` has the first alone."""
        return self.source.eos_tokens

    def attach(self, pools: RankPools) -> None:
        """See `Engine`."""
        if (pools.layout.topology, pools.layout.rank) != (Topology(), RankId(0, 0)):
            raise ConfigError(
                "this engine has one rank", where="engine.attach", expected="tp = pp = dcp = 1",
                actual=f"{pools.layout.topology} {pools.layout.rank}",
            )  # fmt: skip
        self._pools = pools
        self._mover = Mover(self.walk, self.source.new_cache, pools, self.device)
        self._running.clear()
        self._caches.clear()

    def start(self, request: Request, tables: Tables) -> None:
        """See `Engine`."""
        where, most = f"request {request.request_id}", self._facts.max_tokens
        ids = own_ids(request.token_ids, where)
        if not ids.size:
            raise RoomError("a request has at least one token", code="prompt_empty", where=where)
        if ids.size >= most:
            raise RoomError(
                "the request can never fit", code="prompt_too_long", where=where, expected=f"below {most}",
                actual=ids.size,
            )  # fmt: skip
        if int(ids.min()) < 0 or int(ids.max()) >= self._facts.vocab_size:
            raise RoomError("a token outside the vocabulary", code="request_rejected", where=where)
        if request.request_id in self._running:
            raise RoomError("that request is known already", code="request_rejected", where=where)
        self._ready()
        self._pools.reset(tables)
        running = Running(request.request_id, request.sampling, tables, prompt=ids)
        running.scores = [] if request.score else None
        self._running[request.request_id] = running

    def prefill(self, chunk: PrefillChunk) -> Output | None:
        """See `Engine`."""
        running = self._known(chunk.request_id)
        prompt = running.prompt
        if prompt is None or chunk.start != running.tokens or not chunk.start < chunk.stop <= len(prompt):
            raise RoomError(
                "a chunk continues where the last one stopped", code="request_rejected", where=chunk.request_id,
                expected=f"start {running.tokens}, stop up to {0 if prompt is None else len(prompt)}",
                actual=f"[{chunk.start}, {chunk.stop})",
            )  # fmt: skip
        if chunk.stop < len(prompt) and not self.manners.continues:
            raise RoomError(
                "this model of the library does not go on from its state in a chunk of several tokens",
                code="request_rejected", where=chunk.request_id, expected=f"one chunk of {len(prompt)} tokens",
                actual=f"[{chunk.start}, {chunk.stop})", hint="Raise the prefill worker's tokens of a chunk.",
            )  # fmt: skip
        self._claim(running, chunk.tables)
        running.tables = chunk.tables
        ids = prompt[chunk.start : chunk.stop]
        every = self._step([running], ids[None], every=running.scores is not None)[0]
        running.digest.add(ids)
        if running.scores is not None:
            following = prompt[chunk.start + 1 : chunk.stop + 1].tolist()
            running.scores += [float(logprobs(row)[t]) for row, t in zip(every, following, strict=False)]
        if chunk.stop < len(prompt):
            return None
        cache = self._caches.pop((running.request_id,))
        running.extra = msgspec.msgpack.encode(Extra(numbers(cache, self.walk)))
        output = self._sampled(running, every[-1])
        running.first = (output.token, output.logprob)
        return output

    def prompt_logprobs(self, request_id: str) -> NDArray[np.float64]:
        """See `PromptScorer`. A scored prompt's first token comes from a larger product: equal within rounding."""
        running = self._known(request_id)
        if running.first is None or running.scores is None:
            raise RoomError("the prompt is not scored here", code="request_rejected", where=request_id)
        return np.array(running.scores, dtype=np.float64)

    def handoff(self, request_id: str) -> HandoffRecord:
        """See `Engine`."""
        running = self._known(request_id)
        if running.first is None or running.drawn != 1:
            raise RoomError("the prompt is not prefilled here", code="request_rejected", where=request_id)
        return HandoffRecord(
            model=self._facts.fingerprint,
            prompt_tokens=running.tokens,
            prompt_digest=running.digest.value,
            first_token=running.first[0],
            first_logprob=running.first[1],
            sampling=running.sampling,
            sampled=running.drawn,
            extra=running.extra,
        )

    def admit(self, request_id: str, record: HandoffRecord, tables: Tables) -> None:
        """See `Engine`. The cache is built here, from the pools and the record alone."""
        if request_id in self._running:
            raise RoomError("that request is known already", code="request_rejected", where=request_id)
        if record.model != self._facts.fingerprint:
            raise RoomError(
                "the record belongs to another model", code="request_rejected", where=request_id,
                expected=self._facts.fingerprint, actual=record.model,
            )  # fmt: skip
        if not 0 <= record.first_token < self._facts.vocab_size or record.prompt_tokens >= self._facts.max_tokens:
            raise RoomError("the record is not possible", code="request_rejected", where=request_id)
        self._check_extra(request_id, record)
        self._ready()
        self._pools.take(tables)
        running = Running(request_id, record.sampling, tables, record.prompt_tokens, record.sampled)
        with self._clean():
            self._caches[request_id,] = self._ready().load([running.span])
        self._running[request_id] = running

    def decode(self, batch: Sequence[DecodeItem]) -> list[Output] | None:
        """See `Engine`. One forward for each `decode_batch` requests."""
        members = [self._known(item.request_id) for item in batch]
        require_distinct(batch)
        for running, item in zip(members, batch, strict=True):
            self._claim(running, item.tables)
        for running, item in zip(members, batch, strict=True):
            running.tables = item.tables
            if running.tokens >= self._facts.max_tokens:
                raise RoomError("the sequence is at its longest", code="prompt_too_long", where=item.request_id)
        outputs: dict[str, Output] = {}
        tokens = {item.request_id: item.token for item in batch}
        for group in self._groups(members):
            ids = np.array([[tokens[running.request_id]] for running in group], dtype=np.int64)
            for running, rows in zip(group, self._step(group, ids), strict=True):
                outputs[running.request_id] = self._sampled(running, rows[-1])
        return [outputs[item.request_id] for item in batch]

    def release(self, request_id: str) -> None:
        """See `Engine`."""
        self._running.pop(request_id, None)
        self._forget({request_id})

    # --- inside ---

    def _ready(self) -> Mover:
        if self._mover is None:
            raise ConfigError("the engine has no pools", where="engine.attach")
        return self._mover

    def _known(self, request_id: str) -> Running:
        if request_id not in self._running:
            raise RoomError("no such request in this engine", code="request_rejected", where=request_id)
        return self._running[request_id]

    def _claim(self, running: Running, tables: Tables) -> None:
        """Refuse tables that are not of the memory where this request's state lies."""
        require_same_lease(running.request_id, running.tables, tables)
        self._pools.take(tables)

    def _sampled(self, running: Running, logits: NDArray[np.float64]) -> Output:
        token, logprob = choose(logits, running.sampling, running.drawn)
        running.drawn += 1
        return Output(running.request_id, token, logprob, logits)

    def _check_extra(self, request_id: str, record: HandoffRecord) -> None:
        """What the caches count must be what this model's caches count after so many tokens."""
        try:
            found = _extra_decoder.decode(record.extra).scalars
        except msgspec.MsgspecError as error:
            raise RoomError(
                "the record's counters do not decode",
                code="request_rejected",
                where=request_id,
                actual=str(error)[:200],
            ) from None
        if len(found) != len(self.walk.scalars):
            raise RoomError(
                "the record has other counters", code="request_rejected", where=request_id,
                expected=len(self.walk.scalars), actual=len(found),
            )  # fmt: skip
        for scalar, value in zip(self.walk.scalars, found, strict=True):
            want = scalar.at(record.prompt_tokens)
            if type(value) is not type(want) or value != want:
                raise RoomError(
                    "the record is not possible", code="request_rejected",
                    where=f"{request_id}, {name_of(scalar.layer, scalar.path)}", expected=want, actual=value,
                )  # fmt: skip

    def _groups(self, members: list[Running]) -> Iterator[list[Running]]:
        """Requests of one forward each, in order; of equal length where the model's caches cannot be padded."""
        most = self.options.decode_batch
        by_length: dict[int, list[Running]] = {}
        for running in members:
            by_length.setdefault(0 if self.manners.pads else running.tokens, []).append(running)
        for same in by_length.values():
            for at in range(0, len(same), most):
                yield same[at : at + most]

    def _step(self, group: list[Running], ids: NDArray[np.int64], *, every: bool = False) -> NDArray[np.float64]:
        """One forward. ids: int64 [B, n]. On the host, float64 [B, T, vocabulary] logits of every new token, or with
        T = 1 of the last one."""
        mover, names = self._ready(), tuple(running.request_id for running in group)
        cache = self._caches.pop(names, None)
        self._forget(set(names))
        with self._clean():
            if cache is None:
                started = group[0].tokens > 0
                cache = mover.load([running.span for running in group]) if started else self.source.new_cache()
            on_device = torch.tensor(ids, device=self.device)  # a copy: the prompt's own ids are nobody's to write
            logits = forward(self.model, on_device, cache, [r.tokens for r in group], every=every)
            count = ids.shape[1]
            mover.store(cache, [Span(r.tables, r.tokens, r.tokens + count) for r in group])
            result: NDArray[np.float64] = (logits if every else logits[:, None]).double().cpu().numpy()
        for running in group:
            running.tokens += count
        self._caches[names] = cache
        return result

    def _forget(self, names: set[str]) -> None:
        """Drop caches with any of these requests: the pools are ahead of them, or the requests are over."""
        for key in [key for key in self._caches if names & set(key)]:
            del self._caches[key]

    @contextmanager
    def _clean(self) -> Iterator[None]:
        """No gradients; a device without memory is a refusal of this request, not the end of the engine."""
        try:
            with torch.inference_mode():
                yield
        except PdError:
            raise
        except torch.OutOfMemoryError as error:
            raise RoomError(
                "the device has no memory for this step", code="pool_exhausted", where=self.device,
                actual=str(error).splitlines()[0][:200],
            ) from None  # fmt: skip


def _device(name: str) -> str:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError("not a device", where=f"{WHERE}.device", expected="cpu | cuda:0", actual=name) from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError("not a device", where=f"{WHERE}.device", expected="cpu | cuda:0", actual=name)
    require_device(name, where=f"{WHERE}.device")
    return f"cuda:{device.index or 0}" if device.type == "cuda" else "cpu"
