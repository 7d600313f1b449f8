"""`sglang-pd demo`: real processes over a real transport, compared with the same model run whole."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import msgspec
import numpy as np

from sglang_pd.engines.base import Sampling
from sglang_pd.launch.plan import Deployment, load_deployment
from sglang_pd.launch.processes import Say
from sglang_pd.launch.stack import Stack, running
from sglang_pd.launch.up import look
from sglang_pd.launch.whole import Whole
from sglang_pd.protocol.errors import RoomError

LENGTHS: Final = (1, 2, 37, 64, 65, 200, 500, 1000)
STREAMED: Final = frozenset({64, 500})
SAMPLED: Final = frozenset({37, 200})
"""Lengths of the prompts that are streamed, and of those that are sampled: the sampler's state travels too."""
CHUNK_TOKENS: Final = 512
"""The longest prompt is computed and sent in two chunks, the others in one."""
NEW_TOKENS: Final = 16
SAMPLING: Final = Sampling(temperature=0.8, top_p=0.95, top_k=40, seed=20)
POISON: Final = 0x7B
REQUEST_S: Final = 60.0

QWEN4: Final[dict[str, Any]] = {
    "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 2048, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "indexed_attention"] * 2, "hc_count": 2, "hc_lowrank": 8,
    "ple_layer_ids": [1, 3], "ple_embed_dim": 16, "heads_per_ngram": 2, "ngram_vocab_size_base": 101,
    "split_ngram_parts": 1, "make_ngram_vocab_size_divisible_by": 4, "indexer_n_heads": 2, "indexer_kv_heads": 1,
    "indexer_head_dim": 16, "indexer_budget": 64, "indexer_compress_ratio": 4,
}  # fmt: skip

MODELS: Final[dict[str, dict[str, Any]]] = {
    "reference": {"name": "reference", "options": {}},
    "Qwen4ExpForCausalLM": {
        "name": "transformers",
        "options": {
            "random": {"class": "Qwen4ExpForCausalLM", "config": QWEN4, "seed": 4},
            "dtype": "float32",
            "self_check": False,
        },
    },
}
"""Engines of the demo: our exact one, and a hybrid model of the library at random weights."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt: what came back through prefill, transfer and decode, beside the model run whole."""

    tokens: int
    how: str
    equal_tokens: int
    equal_logprobs: int
    wanted: int
    seconds: float
    stages_s: dict[str, float]
    room: int
    error: str = ""

    @property
    def good(self) -> bool:
        """Every token and log-probability is the whole run's."""
        return not self.error and self.equal_tokens == self.equal_logprobs == self.wanted


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One model. bytes_by_component: moved, as decode recorded. stages_s: mean seconds of a room in each stage."""

    model: str
    backend: str
    transport: str
    answers: list[Answer]
    bytes_by_component: dict[str, int]
    stages_s: dict[str, dict[str, float]]
    seconds: float

    @property
    def good(self) -> bool:
        """Nothing differs, and something was compared."""
        return bool(self.answers) and all(answer.good for answer in self.answers)


@dataclass
class _Compared:
    """Whole runs, made on a thread while the processes start."""

    prompts: dict[int, list[int]] = field(default_factory=dict)
    results: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    error: BaseException | None = None


@dataclass(frozen=True)
class Plan:
    """What to run. backend: a configuration's section. sets: `path=value`, as for `up`."""

    models: Sequence[str]
    backend: Mapping[str, Any]
    sets: Sequence[str] = ()


def deployment_of(model: str, plan: Plan) -> Deployment:
    """What the demo starts for one of `MODELS`: any free ports, decode's pools fragmented and full of poison."""
    return load_deployment(
        "",
        plan.sets,
        document={
            "engine": {**MODELS[model], "chunk_tokens": CHUNK_TOKENS},
            "pools": {"tokens": 4096, "rows": 8, "page_tokens": 16},
            "backend": dict(plan.backend),
            "network": {"bootstrap_port": 0, "http_port": 0},
            "verify": "full",
            "prefill": {"pools": {"order": "high"}},
            "decode": {"pools": {"order": "random", "seed": 7, "poison": POISON}},
            "router": {"port": 0},
        },
    )


def run_model(model: str, plan: Plan, say: Say) -> Outcome:
    """One model through its own processes. Raises `ConfigError` with the last words of a process that ends."""
    began_s = time.monotonic()
    deployment, whole = deployment_of(model, plan), _Compared()
    thread = threading.Thread(target=_run_whole, args=(deployment, whole), daemon=True)
    thread.start()
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with running(deployment, say, environ) as stack:
        thread.join()
        if whole.error is not None:
            raise whole.error
        answers = asyncio.run(_ask_all(stack.url, whole))
        moved, stages, transport = _observed(stack, {answer.room for answer in answers if not answer.error})
    return Outcome(
        model=model,
        backend=deployment.configs["decode"].backend.name,
        transport=transport,
        answers=answers,
        bytes_by_component=moved,
        stages_s=stages,
        seconds=time.monotonic() - began_s,
    )


def _run_whole(deployment: Deployment, into: _Compared) -> None:
    try:
        model = Whole(deployment.configs["prefill"])
        rng = np.random.default_rng(1)
        for length in LENGTHS:
            prompt = rng.integers(3, model.vocab_size, length).tolist()
            into.prompts[length] = prompt
            into.results[length] = model.run(prompt, NEW_TOKENS, sampling_for(length))
    except BaseException as error:
        into.error = error


def sampling_for(length: int) -> Sampling:
    """Greedy, or the demo's sampling."""
    return SAMPLING if length in SAMPLED else Sampling()


async def _ask_all(url: str, whole: _Compared) -> list[Answer]:
    async with httpx.AsyncClient(timeout=REQUEST_S) as client:
        return await asyncio.gather(*(_ask(client, url, length, whole) for length in LENGTHS))


async def _ask(client: httpx.AsyncClient, url: str, length: int, whole: _Compared) -> Answer:
    sampling, stream = sampling_for(length), length in STREAMED
    body = {
        "input_ids": whole.prompts[length],
        "stream": stream,
        "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": NEW_TOKENS,
            "ignore_eos": True,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "sampling_seed": sampling.seed,
        },
    }
    how = [*(["stream"] if stream else []), *(["sampled"] if length in SAMPLED else [])]
    how += [f"{-(-length // CHUNK_TOKENS)} chunks"] if length > CHUNK_TOKENS else []
    began_s, error, answer = time.monotonic(), "", {}
    try:
        answer = await (_streamed if stream else _plain)(client, f"{url}/generate", body)
    except (httpx.HTTPError, RoomError, msgspec.DecodeError) as failure:
        error = f"{type(failure).__name__}: {failure}"[:300]
    meta = answer.get("meta_info", {})
    got = [(token, logprob) for logprob, token, _ in meta.get("output_token_logprobs", [])]
    want = whole.results[length]
    return Answer(
        tokens=length,
        how=", ".join(how),
        equal_tokens=_equal(answer.get("output_ids", []), [token for token, _ in want]),
        equal_logprobs=_equal(got, want),
        wanted=NEW_TOKENS,
        seconds=time.monotonic() - began_s,
        stages_s=meta.get("stages_s", {}),
        room=meta.get("bootstrap_room", 0),
        error=error,
    )


def _equal(got: list[Any], want: list[Any]) -> int:
    """How many of `want` are there, in place; none where there are too many."""
    return sum(a == b for a, b in zip(got, want, strict=False)) if len(got) <= len(want) else 0


async def _plain(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post(url, json=body)
    return _checked(response.status_code, msgspec.json.decode(response.content))


async def _streamed(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> dict[str, Any]:
    last: dict[str, Any] = {}
    events, done = 0, False
    async with client.stream("POST", url, json=body) as response:
        async for line in response.aiter_lines():
            payload = line.removeprefix("data: ")
            if payload == "[DONE]":
                done = True
            elif line.startswith("data: "):
                last = _checked(response.status_code, msgspec.json.decode(payload))
                events += 1
    if not done or events < 2:
        raise RoomError("the stream was cut short", code="request_rejected", actual=f"{events} events")
    return last


def _checked(status: int, answer: Any) -> dict[str, Any]:
    if status != 200 or not isinstance(answer, dict) or "error" in answer:
        raise RoomError("the request failed", code="request_rejected", actual=f"{status} {str(answer)[:300]}")
    return answer


def _observed(stack: Stack, rooms: set[int]) -> tuple[dict[str, int], dict[str, dict[str, float]], str]:
    """Bytes by component, mean stage times by role, and the transport, of those rooms, as the workers recorded them."""
    moved: dict[str, int] = {}
    stages: dict[str, dict[str, float]] = {}
    for role, path in stack.sockets.items():
        dump = look(path)
        records = [record for record in dump.ended if record["room"] in rooms] if dump else []
        for record in records:
            for stage, seconds in record["stage_s"].items():
                mean = stages.setdefault(role, {})
                mean[stage] = mean.get(stage, 0.0) + seconds / len(records)
            if role == "decode":
                for component, nbytes in record["bytes"].items():
                    moved[component] = moved.get(component, 0) + nbytes
    with httpx.Client(timeout=10) as client:
        peers = client.get(f"{stack.workers['prefill']['url']}/peers").json()["peers"]
    transport = " ".join(sorted({one for peer in peers for one in peer["transports"]}))
    return dict(sorted(moved.items())), stages, transport


Progress = Callable[[str], None]


def run_all(plan: Plan, say: Say, progress: Progress) -> list[Outcome]:
    """Every model, one after the other."""
    outcomes = []
    for model in plan.models:
        progress(f"{model}: prefill, decode and router start; meanwhile the model runs whole in this process")
        outcomes.append(run_model(model, plan, say))
    return outcomes
