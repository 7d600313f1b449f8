"""The contract between an engine and the worker.

One engine object is one rank's share of a model. All state that outlives a call lies in the rank's pools or is a small
fact that travels in the handoff record; an engine that forgets a component therefore cannot hide it. Scheduling and
allocation are the caller's: every call names the memory (`Tables`) it may touch. Not thread-safe: one engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Protocol, runtime_checkable

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from sglang_pd.memory.lease import Tables
from sglang_pd.memory.pools import RankPools
from sglang_pd.memory.spec import StateSpec
from sglang_pd.protocol.errors import LocalProtocolError, RemoteProtocolError, RoomError
from sglang_pd.protocol.messages import U64

MAX_RECORD_BYTES: Final = 65_536
"""Most bytes of an encoded handoff record; the wire message allows no more."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What an engine states about its model.

    fingerprint: of architecture and weights; instances with different ones never pair. state: the components.
    max_tokens: longest sequence, prompt and answer together. page_multiple: page_tokens is a multiple of it.
    """

    fingerprint: str
    state: StateSpec
    max_tokens: int
    vocab_size: int
    eos_token: int
    page_multiple: int = 1


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are chosen. temperature 0 is greedy (lowest token of equal ones); else seeded, repeatable draws.

    top_k: the k likeliest tokens may be drawn, 0 for all. top_p: of these, the fewest likeliest whose probabilities,
    after the temperature, reach top_p. Of equally likely tokens the lower one comes first.
    """

    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0

    def chooses_as(self, other: Sampling, *, any_seed: bool = False) -> bool:
        """Whether the same logits give the same tokens by both; any_seed: but for the seed."""
        if self.temperature == 0 or other.temperature == 0:
            return self.temperature == other.temperature
        seed = other.seed if any_seed else self.seed
        return msgspec.structs.replace(self, seed=seed) == other


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to be prefilled. token_ids: int64 [prompt tokens], each below the vocabulary's size.
    score: the prompt's own log-probabilities are wanted (engines that are a `PromptScorer` only)."""

    request_id: str
    token_ids: NDArray[np.int64]
    sampling: Sampling = field(default_factory=Sampling)
    score: bool = False


def own_ids(token_ids: Any, where: str) -> NDArray[np.int64]:
    """Token ids as an array of one's own that nobody writes any more: int64 [tokens].

    Callers re-use their arrays; an id that changed while its request waits would be computed under the digest of the
    former. Raises `RoomError` (`request_rejected`) for what is no flat array of integers.
    """
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise RoomError(
            "token ids are a flat array of integers", code="request_rejected", where=where, expected="int64 [tokens]",
            actual=f"{ids.dtype} {list(ids.shape)}",
        )  # fmt: skip
    if ids.strides == (0,) and ids.size:  # a count of one id, made to be refused: as large as it says only if copied
        return np.broadcast_to(np.int64(ids[0]), ids.shape)
    own = np.array(ids, dtype=np.int64)
    own.setflags(write=False)
    return own


TokenNumber = Annotated[int, Meta(ge=0, le=2**31 - 1)]
MAX_TOP: Final = 20
"""Likeliest tokens that are told of one place."""


class HandoffRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The small facts of a prefilled request, beside its state in pools.

    model: fingerprint. prompt_tokens: tokens that the state stands for. prompt_digest: `indices.prompt_digest` of the
    token ids that were computed, which decode compares with its own. first_token, first_logprob: chosen by prefill.
    first_top: the likeliest tokens in its place with their log-probabilities, as many as were asked for.
    sampled: tokens drawn so far, from which a seeded sampler continues. position_delta: what is added to the position
    on each coordinate axis (three for multimodal rotary embeddings). extra: what only this engine understands.
    """

    model: Annotated[str, Meta(max_length=256)]
    prompt_tokens: Annotated[int, Meta(ge=1, le=2**40)]
    prompt_digest: U64
    first_token: TokenNumber
    first_logprob: float
    sampling: Sampling
    first_top: Annotated[tuple[tuple[TokenNumber, float], ...], Meta(max_length=MAX_TOP)] = ()
    sampled: Annotated[int, Meta(ge=0, le=2**40)] = 1
    position_delta: Annotated[tuple[int, ...], Meta(max_length=8)] = ()
    extra: Annotated[bytes, Meta(max_length=32_768)] = b""

    def encode(self) -> bytes:
        """The record as it travels. Raises `LocalProtocolError` where it is too long."""
        data = _encoder.encode(self)
        if len(data) > MAX_RECORD_BYTES:
            raise LocalProtocolError(
                "a handoff record is too long", code="message_malformed", where=self.model,
                expected=f"at most {MAX_RECORD_BYTES} bytes", actual=len(data),
                hint="Large tensors are a REQUEST_ROW component.",
            )  # fmt: skip
        return data

    @staticmethod
    def decode(data: bytes) -> HandoffRecord:
        """The record that a peer sent. Raises `RemoteProtocolError` for anything else."""
        if len(data) > MAX_RECORD_BYTES:
            raise RemoteProtocolError("a handoff record is too long", expected=MAX_RECORD_BYTES, actual=len(data))
        try:
            return _decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise RemoteProtocolError("a handoff record does not decode", where=str(error)[:200]) from None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(HandoffRecord)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Compute positions [start, stop) of a request; start is where the previous chunk stopped."""

    request_id: str
    start: int
    stop: int
    tables: Tables


@dataclass(frozen=True, slots=True)
class DecodeItem:
    """Compute the position that `token` takes. Explicit, so that ranks that do not sample know it too."""

    request_id: str
    token: int
    tables: Tables


@dataclass(frozen=True, slots=True)
class Output:
    """One token chosen. logits: float64 [vocabulary], full precision, on the host; logprob: of `token`."""

    request_id: str
    token: int
    logprob: float
    logits: Any


@runtime_checkable
class PromptScorer(Protocol):
    """An engine that can also say how likely the prompt's own tokens were."""

    def prompt_logprobs(self, request_id: str) -> NDArray[np.float64]:
        """float64 [prompt tokens - 1]: log-probability of each token from the second on, after the last chunk of a
        request that was started with `score`; on the last stage."""
        ...


class Engine(Protocol):
    """One rank of a model."""

    def describe(self) -> ModelFacts:
        """Facts of the model; the same on every rank."""
        ...

    def attach(self, pools: RankPools) -> None:
        """Use these pools from now on. Requests known before are forgotten."""
        ...

    def start(self, request: Request, tables: Tables) -> None:
        """Begin a prompt: its slot gets its initial values; the ids are copied. Raises `RoomError` (`prompt_too_long`,
        `prompt_empty`, `request_rejected`), `LeaseError` for a slot that is armed for receive. A call that raises
        leaves nothing to `release`: the id may be that of a request which runs."""
        ...

    def prefill(self, chunk: PrefillChunk) -> Output | None:
        """Compute a chunk. The first token after the prompt's last chunk, on the last stage; None otherwise."""
        ...

    def handoff(self, request_id: str) -> HandoffRecord:
        """The facts to travel, after the last chunk, on the last stage. The digest is of the ids that `prefill` fed to
        the model, not of those that `start` was given."""
        ...

    def admit(self, request_id: str, record: HandoffRecord, tables: Tables) -> None:
        """Take over a request whose state arrived in this rank's pools. Raises `RoomError` for a foreign record and for
        a request that is known already; what `start` says of a call that raises holds here too."""
        ...

    def decode(self, batch: Sequence[DecodeItem]) -> list[Output] | None:
        """One token for each request of the batch, in order; None on all but the last stage."""
        ...

    def release(self, request_id: str) -> None:
        """Forget a request. Harmless for one that is not known. Its memory is the caller's."""
        ...
