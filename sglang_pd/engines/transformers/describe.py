"""Facts of a model from its options: what `check` and `explain` need, and what the engine states when it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sglang_pd.engines.base import ModelFacts
from sglang_pd.engines.transformers.model import Source, find
from sglang_pd.engines.transformers.options import Options, read
from sglang_pd.engines.transformers.run import forward
from sglang_pd.engines.transformers.shapes import ShapesOnly
from sglang_pd.engines.transformers.state import state_of
from sglang_pd.engines.transformers.walk import Walk, walk
from sglang_pd.protocol.errors import ManifestError, PdError

NO_EOS = -1
"""Stands for the end-of-sequence token of a model that names none; no token is ever equal to it."""


def describe_options(options: Mapping[str, Any] | Options) -> ModelFacts:
    """Facts of the model that the engine's options name. Reads no weights, but for a model that cannot be run without
    them (shapes that depend on values); that one is loaded on the host.

    Raises `ConfigError` for impossible options, `ManifestError` for a model with state that cannot be carried.
    """
    source = find(read(options))
    try:
        with ShapesOnly():  # type: ignore[no-untyped-call]
            found = probe(source, source.meta_model(), "meta")
    except PdError:
        raise
    except Exception:  # whatever the library does with a tensor that has no data
        found = probe(source, source.model("cpu"), "cpu")
    return facts_of(source, found)


def facts_of(source: Source, found: Walk) -> ModelFacts:
    """The same from a walk."""
    eos = source.eos_tokens[0] if source.eos_tokens else NO_EOS
    return ModelFacts(
        source.fingerprint(found.facts), state_of(found, max(eos, 0)), source.max_tokens, source.vocab_size, eos
    )


def probe(source: Source, model: Any, device: str) -> Walk:
    """Walk a model's caches. Raises `ManifestError` for one that cannot be carried, or that takes no such cache."""
    latent = int(getattr(source.text, "kv_lora_rank", None) or 0)

    def run(cache: Any, start: int, count: int) -> None:
        forward(model, torch.ones((1, count), dtype=torch.int64, device=device), cache, [start])

    try:
        with torch.inference_mode(device != "meta"):
            return walk(run, source.new_cache(), latent)
    except (PdError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the library raises anything
        if device == "meta":
            raise
        raise _unusable(source, error) from error


def _unusable(source: Source, error: Exception) -> ManifestError:
    return ManifestError(
        "the model does not run with the library's DynamicCache", where=source.model_class.__name__,
        actual=f"{type(error).__name__}: {str(error)[:300]}", hint="A model with a cache of its own cannot be carried.",
    )  # fmt: skip
