"""What the faces hand to the runners, and what runners tell them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_pd.engines.base import Sampling, own_ids
from sglang_pd.protocol.errors import ErrorInfo


@dataclass(frozen=True, slots=True)
class Token:
    """One chosen token. position: its place in the sequence, prompt included. logits: host array, if asked for.
    top: the likeliest tokens in its place with their log-probabilities, as many as were asked for."""

    token: int
    logprob: float
    position: int
    logits: Any = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of a prompt's own tokens, from its second on: float64 [prompt tokens - 1]. At prefill, before
    its `Token`, where the job asked for them."""

    logprobs: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Finished:
    """The job ended well. reason: `stop` (end token), `length`, or `handed_over` at prefill. stages_s: seconds spent
    in `queue`, `compute`, `hand_over`, `decode`, those that the role has.
    """

    reason: str
    prompt_tokens: int
    tokens: int
    stages_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failed:
    """The job ended by an error; its first cause."""

    error: ErrorInfo


Update = Token | Scores | Finished | Failed
Sink = Callable[[Update], None]
"""Called on the runner's thread; must not block."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """One sequence. room: of the hand-over. token_ids: int64 [prompt], copied. address: prefill's control, at decode
    only. Raises `RoomError` (`request_rejected`) for token ids that are no flat array of integers.

    request_id names it in the engine: one that no other job of this process has. max_new_tokens counts the first token,
    which prefill chose. ignore_eos: go on past the end token. score: tell the prompt's own log-probabilities.
    top: how many of the likeliest tokens are told beside each chosen one. What both sides are told must agree: the same
    sampling, and at prefill at least decode's top. any_seed: at decode, `sampling.seed` is nobody's wish, and the
    record's counts.
    """

    room: int
    request_id: str
    token_ids: NDArray[np.int64]
    sink: Sink
    sampling: Sampling = field(default_factory=Sampling)
    address: str = ""
    max_new_tokens: int = 16
    stop_tokens: frozenset[int] = frozenset()
    ignore_eos: bool = False
    keep_logits: bool = False
    score: bool = False
    top: int = 0
    traceparent: str = ""
    any_seed: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", own_ids(self.token_ids, f"request {self.request_id}"))
