"""What the Hugging Face engine is told: which model, in which precision, where, and how decode may batch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from sglang_pd.config import read_options
from sglang_pd.protocol.errors import ConfigError

WHERE: Final = "$.engine.options"


class RandomModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model with drawn weights. class: a causal language model of the library, by its class name. config: the
    arguments of its configuration class. seed: of the weights."""

    class_name: Annotated[str, Meta(max_length=128)] = msgspec.field(name="class")
    config: dict[str, Any] = {}
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """path: a checkpoint folder made by `save_pretrained`; or random: a model with drawn weights. Exactly one.

    dtype: of the weights; `auto` takes the checkpoint's own, float32 where it names none. device: where the model
    computes, "" for the device of the pools. attention: the library's attention implementation, "" for its choice.
    max_tokens: longest sequence, prompt and answer; 0 for what the model's configuration says.

    decode_batch: most requests of one forward in decode. 1 is bit-equal to the model run alone. Above 1, a forward
    takes several requests, padded on the left; the library's sums then depend on the batch, so that logits agree
    within rounding only. A near tie may then choose another token, and so may a tie of the scores by which sparse
    attention selects.
    self_check: at load, hand a short prompt over inside the process and refuse a model whose next logits change.
    """

    path: Annotated[str, Meta(max_length=4096)] = ""
    random: RandomModel | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Annotated[str, Meta(max_length=32)] = ""
    attention: Literal["", "eager", "sdpa"] = ""
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    decode_batch: Annotated[int, Meta(ge=1, le=1024)] = 1
    self_check: bool = True


def read(options: Mapping[str, Any] | Options) -> Options:
    """The options as a struct. Raises `ConfigError` for an unknown key, or where not exactly one model is named."""
    found = options if isinstance(options, Options) else read_options(options, Options, where=WHERE)
    if bool(found.path) == (found.random is not None):
        raise ConfigError(
            "name one model", where=WHERE, expected="either path (a checkpoint folder) or random",
            actual="both" if found.path else "neither",
            hint="For drawn weights: random: {class: Qwen4ExpForCausalLM, config: {...}, seed: 0}",
        )  # fmt: skip
    if found.path and not (Path(found.path) / "config.json").is_file():
        raise ConfigError(
            "no checkpoint there", where=f"{WHERE}.path", expected="a folder with config.json and *.safetensors",
            actual=found.path, hint="Make one with model.save_pretrained(folder); nothing is downloaded.",
        )  # fmt: skip
    return found
