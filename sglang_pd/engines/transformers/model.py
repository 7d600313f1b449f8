"""Finding, building and naming a model of the library. The only module here that imports it."""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import xxhash

from sglang_pd.engines.transformers.options import WHERE, Options
from sglang_pd.protocol.errors import ConfigError

VERSIONS: Final = ((5, 24), (5, 40))
"""Library versions from, and up to but not including; the walk over caches knows these."""
SAMPLE_BYTES: Final = 1 << 16
SAMPLES: Final = 256
WHOLE_FILE_BYTES: Final = 1 << 26


def library() -> Any:
    """The `transformers` package. Raises `ConfigError` where it is missing or of another version."""
    try:
        found = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            "the engine's library is not installed", where="$.engine.name", expected="transformers", actual=str(error),
            hint="pip install 'sglang-pd[transformers]'",
        ) from None  # fmt: skip
    version = tuple(int(part) for part in found.__version__.split(".")[:2])
    if not VERSIONS[0] <= version < VERSIONS[1]:
        low, high = (".".join(map(str, v)) for v in VERSIONS)
        raise ConfigError(
            "a version of transformers whose caches are not known here", where="$.engine.name",
            expected=f">= {low}, < {high}", actual=found.__version__, hint="pip install 'sglang-pd[transformers]'",
        )  # fmt: skip
    found.logging.set_verbosity_error()
    found.logging.disable_progress_bar()
    return found


@dataclass(frozen=True)
class Source:
    """A model before its weights: its class and configuration, and the options that name it."""

    options: Options
    model_class: Any
    config: Any
    dtype: torch.dtype

    @property
    def text(self) -> Any:
        """The configuration of the text decoder."""
        return self.config.get_text_config(decoder=True)

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return int(self.text.vocab_size)

    @property
    def eos_tokens(self) -> tuple[int, ...]:
        """End-of-sequence tokens, the first of which is the main one; () where the model names none."""
        eos = getattr(self.text, "eos_token_id", None)
        if eos is None:
            return ()
        return tuple(int(token) for token in eos) if isinstance(eos, list | tuple) else (int(eos),)

    @property
    def max_tokens(self) -> int:
        """Longest sequence."""
        known = getattr(self.text, "max_position_embeddings", None)
        most = int(known) if known else 2**31 - 1
        return min(most, self.options.max_tokens or most)

    def new_cache(self) -> Any:
        """A cache without any state, with the layers of this model."""
        return library().DynamicCache(config=self.config)

    def meta_model(self) -> Any:
        """The model without weights: every tensor has a shape and no data."""
        with torch.device("meta"):
            return self._build().eval()

    def model(self, device: str) -> Any:
        """The model with its weights, on a device."""
        if self.options.random is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.options.random.seed)
                built = self._build()
            redraw(built, self.options.random.seed)
        else:
            with _explained(f"{WHERE}.path", "the checkpoint cannot be loaded"):
                built = self.model_class.from_pretrained(
                    self.options.path, config=self.config, dtype=self.dtype, local_files_only=True,
                    use_safetensors=True, trust_remote_code=False, **self._attention(),
                )  # fmt: skip
        return built.to(device).eval().requires_grad_(False)

    def _build(self) -> Any:
        where = f"{WHERE}.random.config" if self.options.random is not None else f"{WHERE}.path"
        with _explained(where, f"{self.model_class.__name__} cannot be built"):
            return self.model_class._from_config(self.config, dtype=self.dtype, **self._attention())

    def _attention(self) -> dict[str, str]:
        return {"attn_implementation": self.options.attention} if self.options.attention else {}

    def fingerprint(self, cache_facts: str) -> str:
        """Identity of architecture, weights, precision, and what its caches hold. Reads no weights of a drawn model;
        of a checkpoint, whole files up to 64 MiB and 256 blocks of 64 KiB of larger ones, with all their headers."""
        facts = {
            "class": self.model_class.__name__,
            "config": _canonical(self.config.to_dict()),
            "dtype": str(self.dtype),
            "cache": cache_facts,
            "weights": _weights_digest(Path(self.options.path))
            if self.options.path
            else f"drawn {self.options.random.seed if self.options.random else 0} {torch.__version__.split('+')[0]}",
        }
        return f"{self.model_class.__name__}-{xxhash.xxh3_128_hexdigest(msgspec.json.encode(facts, order='sorted'))}"


def find(options: Options) -> Source:
    """The class and configuration that the options name; no weights. Raises `ConfigError`."""
    hf = library()
    if options.random is not None:
        model_class = _class_of(hf, options.random.class_name, f"{WHERE}.random.class")
        with _explained(f"{WHERE}.random.config", f"not a configuration of {options.random.class_name}"):
            config = model_class.config_class(**options.random.config)
    else:
        with _explained(f"{WHERE}.path", "the configuration cannot be read"):
            config = hf.AutoConfig.from_pretrained(options.path, local_files_only=True, trust_remote_code=False)
        names = list(getattr(config, "architectures", None) or ())
        if not names:
            raise ConfigError(
                "the checkpoint names no model class", where=f"{WHERE}.path", expected="architectures in config.json",
                actual=options.path,
            )  # fmt: skip
        model_class = _class_of(hf, names[0], f"{WHERE}.path")
        if not isinstance(config, model_class.config_class):
            config = config.get_text_config(decoder=True)
    return Source(options, model_class, config, _dtype(options, config))


def _class_of(hf: Any, name: str, where: str) -> Any:
    found = getattr(hf, name, None) if name.isidentifier() else None
    if not (
        isinstance(found, type) and issubclass(found, hf.PreTrainedModel) and issubclass(found, hf.GenerationMixin)
    ):
        raise ConfigError(
            "not a language model of the library", where=where,
            expected="a class of transformers that generates, such as Qwen4ExpForCausalLM", actual=name,
        )  # fmt: skip
    return found


def _dtype(options: Options, config: Any) -> torch.dtype:
    if options.dtype != "auto":
        named: torch.dtype = getattr(torch, options.dtype)
        return named
    own = getattr(config, "dtype", None)
    return own if isinstance(own, torch.dtype) else torch.float32


def redraw(model: Any, seed: int) -> None:
    """Draw every matrix again with standard deviation 1 / sqrt(inputs): the library's 0.02 makes states irrelevant.

    Vectors (norms, biases, decay rates) keep what the library drew. Drawn in float32 on the host, one generator for all
    in order of their names, so that any precision and device sees the same numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
            if parameter.dim() < 2:
                continue
            inputs = parameter.shape[-1] if parameter.shape[-1] > 1 else parameter.shape[-2]
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.copy_((drawn * inputs**-0.5).to(parameter.dtype))


def _canonical(value: Any) -> Any:
    """Plain data, without what does not change a result (versions, names, places)."""
    if isinstance(value, Mapping):
        dropped = {
            "transformers_version",
            "_name_or_path",
            "architectures",
            "dtype",
            "_attn_implementation",
            "id2label",
        }
        return {str(k): _canonical(v) for k, v in value.items() if k not in dropped and k != "label2id"}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _weights_digest(folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            "the checkpoint has no weights", where=f"{WHERE}.path", expected="*.safetensors", actual=str(folder)
        )
    for file in files:
        size = file.stat().st_size
        digest.update(f"{size};".encode())
        with open(file, "rb") as stream:
            for offset in _sampled(size, stream.read(8)):
                stream.seek(offset)
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _sampled(size: int, start: bytes) -> Iterator[int]:
    """Offsets of the blocks to read: all of a small file; header, and evenly spread blocks, of a large one."""
    if size <= WHOLE_FILE_BYTES:
        yield from range(0, size, SAMPLE_BYTES)
        return
    header = min(int.from_bytes(start, "little") + 8, size)
    yield from range(0, header, SAMPLE_BYTES)
    step = max(SAMPLE_BYTES, (size - header) // SAMPLES)
    yield from range(header, size, step)
    yield max(header, size - SAMPLE_BYTES)


@contextmanager
def _explained(where: str, message: str) -> Iterator[None]:
    """What the library raises as a `ConfigError` that names the option."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # the library raises anything: strict configurations, hub errors, assertions
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ConfigError(message, where=where, actual=" ".join(lines)[:500] or type(error).__name__) from error


def accepts(model: Any, name: str) -> bool:
    """True where the model's forward takes an argument of that name."""
    return name in _parameters(type(model).forward)


@lru_cache
def _parameters(forward: Any) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)
