"""Tiny models of the library, the library's own loop over them, and instances of our engine with pools of their own."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from support.reference_run import Host, Running, Size

from sglang_pd.engines.transformers import TransformersEngine

torch.set_num_threads(1)

VOCAB, EOS = 97, 2
BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 512, "eos_token_id": EOS, "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
HEADS = {"head_dim": 8}
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
GDN = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
INDEXER = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}
WINDOW = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"] * 2}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16}
QWEN4 = {
    **{key: value for key, value in BASE.items() if key != "intermediate_size"}, **HEADS, **EXPERTS, **GDN,
    "layer_types": ["linear_attention", "indexed_attention"] * 2, "hc_count": 2, "hc_lowrank": 8,
    "ple_layer_ids": [1, 3], "ple_embed_dim": 16, "heads_per_ngram": 2, "ngram_vocab_size_base": 101,
    "split_ngram_parts": 1, "make_ngram_vocab_size_divisible_by": 4, "indexer_n_heads": 2, "indexer_kv_heads": 1,
    "indexer_head_dim": 8, "indexer_budget": 16, "indexer_compress_ratio": 4,
}  # fmt: skip

NAMED: dict[str, dict[str, Any]] = {
    "Qwen4ExpForCausalLM": QWEN4,
    "Qwen3NextForCausalLM": {**BASE, **HEADS, **EXPERTS, **GDN},
    "DeepseekV32ForCausalLM": {**BASE, **MLA, **INDEXER},
    "GptOssForCausalLM": {**BASE, **HEADS, **WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "FalconH1ForCausalLM": {
        **BASE, **HEADS, **MAMBA, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_conv": 4, "mamba_expand": 1,
    },
}  # fmt: skip
"""Models that the engine names, the state of each of another sort."""

OTHERS: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {**BASE, **HEADS, **MAMBA, "attn_layer_indices": [1, 3], "mamba_expand": 2},
    "DeepseekV3ForCausalLM": {**BASE, **MLA},
    "Gemma3ForCausalLM": {**BASE, **HEADS, **WINDOW},
    "Gemma3nForCausalLM": {
        **BASE, **HEADS, **WINDOW, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 2, "laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4,
    },
    "Gemma4ForCausalLM": {
        **BASE, **HEADS, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "global_head_dim": 16,
        "sliding_window": 12,
    },
    "GlmMoeDsaForCausalLM": {**BASE, **MLA, **INDEXER},
    "GraniteMoeHybridForCausalLM": {
        **BASE, **HEADS, **MAMBA, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 0,
        "shared_intermediate_size": 48,
    },
    "JambaForCausalLM": {
        **BASE, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False,
    },
    "KimiLinearForCausalLM": {
        **BASE, **HEADS, **MLA, "linear_num_heads": 4, "linear_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "Lfm2ForCausalLM": {
        **BASE, "layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3, "block_auto_adjust_ff_dim": False,
    },
    "Llama4ForCausalLM": {
        **BASE, **HEADS, "attention_chunk_size": 16, "num_local_experts": 2, "intermediate_size_mlp": 48,
    },
    "LlamaForCausalLM": {**BASE, **HEADS},
    "Mamba2ForCausalLM": {
        "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8, "head_dim": 8,
        "n_groups": 1, "chunk_size": 16, "eos_token_id": EOS, "bos_token_id": 1, "pad_token_id": 0,
    },
    "MistralForCausalLM": {**BASE, **HEADS, "sliding_window": 12},
    "NemotronHForCausalLM": {
        **BASE, **HEADS, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 8,
        "chunk_size": 16,
    },
    "OlmoHybridForCausalLM": {**BASE, **HEADS},
    "Qwen3MoeForCausalLM": {**BASE, **HEADS, **EXPERTS, "decoder_sparse_step": 1},
    "Qwen3_5ForCausalLM": {**BASE, **HEADS, **GDN},
    "Zamba2ForCausalLM": {
        **BASE, "layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 8, "mamba_ngroups": 1,
        "n_mamba_heads": 8, "mamba_headdim": 8, "chunk_size": 16, "num_mem_blocks": 1, "adapter_rank": 4,
    },
}  # fmt: skip
"""Models that nobody thought of when the engine was written."""

STATE_ELSEWHERE = {"RecurrentGemmaForCausalLM": {**BASE, **HEADS}}
OTHER_CACHES = {
    "DeepseekV4ForCausalLM": {**BASE, **HEADS, "sliding_window": 12},
    "MiniMaxForCausalLM": {
        **BASE, **HEADS, "num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 16,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "xLSTMForCausalLM": {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2},
}  # fmt: skip
"""Models that cannot be carried."""

ALL_SELECTED = {
    f"{name}, all selected": {**BASE, **MLA, **INDEXER, "index_topk": 64}
    for name in ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
}
"""Sparse attention that selects every token: scores at a tie (many are zero here) depend on what else is in a batch."""

MODELS = NAMED | OTHERS | STATE_ELSEWHERE | OTHER_CACHES | ALL_SELECTED


def options(name: str, dtype: str = "float32", **more: Any) -> dict[str, Any]:
    return {"random": {"class": name.split(",")[0], "config": MODELS[name], "seed": 1}, "dtype": dtype, **more}


@cache
def engine(name: str, dtype: str = "float32", number: int = 0, decode_batch: int = 1) -> TransformersEngine:
    """An engine, built once for each number: two are two instances of one model."""
    return TransformersEngine(options(name, dtype, decode_batch=decode_batch))


def host(engine_: TransformersEngine, size: Size, **more: Any) -> Host:
    """Pools and an allocator for an engine, which forgets what it knew."""
    return Host(cast(Any, None), size, cast(Any, engine_), **more)


def prompt(count: int, seed: int = 7) -> NDArray[np.int64]:
    """A prompt with an end-of-sequence inside the n-gram history, where it is long enough."""
    ids = np.random.default_rng(seed).integers(3, VOCAB, count)
    if count > 4:
        ids[count - 2] = EOS
    return ids


def library_loop(model: Any, ids: NDArray[np.int64], chunks: Sequence[int], steps: int) -> tuple[Running, Any]:
    """The model run whole by the library alone: its own cache, its own greedy choice. Also the cache at the end.

    Shares no line with the engine. `steps` tokens follow the first.
    """
    own = transformers.DynamicCache(config=model.config)
    placed = "position_ids" in inspect.signature(model.forward).parameters
    run = Running("whole", cast(Any, None))

    def step(tokens: torch.Tensor) -> torch.Tensor:
        stop = run.stop + tokens.shape[1]
        more = {"position_ids": torch.arange(run.stop, stop)[None]} if placed else {}
        run.stop = stop
        return cast(
            torch.Tensor, model(input_ids=tokens, cache=own, use_cache=True, logits_to_keep=1, **more).logits[0, -1]
        )

    with torch.inference_mode():
        logits = torch.empty(0)
        for part in torch.from_numpy(ids)[None].split(list(chunks) or [len(ids)], dim=1):
            logits = step(part)
        for number in range(steps + 1):
            run.logits.append(logits.double().numpy())
            run.tokens.append(int(torch.argmax(logits)))
            if number < steps:
                logits = step(torch.tensor([[run.tokens[-1]]]))
    return run, own
