"""Text to tokens and back: a byte-level tokenizer that fits any model, and the one that lies with a checkpoint."""

from __future__ import annotations

import codecs
import importlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from sglang_pd.engines.base import ModelFacts
from sglang_pd.protocol.errors import ConfigError, RoomError

log = logging.getLogger("sglang_pd.server")

TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
BYTE_VALUES: Final = 245
"""UTF-8 never uses bytes from 245 on."""
DEFAULT_OFFSET: Final = 3


class Detokenizer(Protocol):
    """Text of one answer, token by token."""

    def add(self, token: int) -> str:
        """Text that is certain now."""

    def finish(self) -> str:
        """What was held back, as an incomplete character is."""


class Tokenizer(Protocol):
    """What a server needs of a tokenizer."""

    name: str

    def encode(self, text: str) -> list[int]:
        """Tokens of a text. Raises `RoomError` where it cannot be written with this vocabulary."""

    def detokenizer(self) -> Detokenizer:
        """For one answer."""

    def token_text(self, token: int) -> str:
        """One token alone; an incomplete character shows as U+FFFD."""

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens of a conversation, ready for the answer. Raises `RoomError` without a chat template."""


class ByteTokenizer:
    """Token = byte + offset, for models without a tokenizer of their own. Needs 245 + offset tokens for text.

    Small vocabularies do: UTF-8 has no byte above 244. The offset (usually 3) leaves the end token alone.
    """

    name = "bytes"

    def __init__(self, vocab_size: int, eos_token: int) -> None:
        self._offset = eos_token + 1 if DEFAULT_OFFSET <= eos_token < DEFAULT_OFFSET + BYTE_VALUES else DEFAULT_OFFSET
        self._vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        tokens = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8).astype(np.int64) + self._offset
        if tokens.size and int(tokens.max()) >= self._vocab_size:
            raise RoomError(
                "this model's vocabulary is too small for that text",
                code="request_rejected",
                where="text",
                expected=f"{BYTE_VALUES + self._offset} tokens for any text",
                actual=f"{self._vocab_size} tokens",
                hint="Send input_ids.",
            )
        found: list[int] = tokens.tolist()
        return found

    def detokenizer(self) -> Detokenizer:
        """See `Tokenizer`."""
        return _ByteStream(self._offset)

    def token_text(self, token: int) -> str:
        """See `Tokenizer`."""
        return _byte(token, self._offset).decode("utf-8", "replace")

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """See `Tokenizer`."""
        raise no_template(self.name)


def _byte(token: int, offset: int) -> bytes:
    return bytes([token - offset]) if 0 <= token - offset < 256 else b""


class _ByteStream:
    def __init__(self, offset: int) -> None:
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """See `Detokenizer`."""
        return self._decoder.decode(_byte(token, self._offset))

    def finish(self) -> str:
        """See `Detokenizer`."""
        return self._decoder.decode(b"", final=True)


class CheckpointTokenizer:
    """The tokenizer of a checkpoint folder, through `transformers`."""

    def __init__(self, folder: str) -> None:
        library = importlib.import_module("transformers")
        try:
            self._tokenizer: Any = library.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # the library raises anything
            raise ConfigError(
                "the checkpoint's tokenizer cannot be read", where="$.engine.options.path", actual=str(error)[:500]
            ) from None
        self.name = folder

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        return [int(token) for token in self._tokenizer.encode(text)]

    def detokenizer(self) -> Detokenizer:
        """See `Tokenizer`."""
        return _CheckpointStream(self._tokenizer)

    def token_text(self, token: int) -> str:
        """See `Tokenizer`."""
        return str(self._tokenizer.decode([token]))

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """See `Tokenizer`."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise no_template(self.name)
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates raise anything for messages they do not like
            raise RoomError(
                "the chat template refuses these messages",
                code="request_rejected",
                where="messages",
                actual=str(error)[:500],
            ) from None
        return [int(token) for token in self._tokenizer.encode(str(text), add_special_tokens=False)]


class _CheckpointStream:
    """Decodes a window of tokens: some tokenizers write a token's text only in the light of those before it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._start = 0
        self._read = 0

    def _text(self, stop: int | None = None) -> str:
        return str(self._tokenizer.decode(self._tokens[self._start : stop], skip_special_tokens=True))

    def add(self, token: int) -> str:
        """See `Detokenizer`."""
        self._tokens.append(token)
        before, now = self._text(self._read), self._text()
        if len(now) <= len(before) or now.endswith("\ufffd"):
            return ""
        self._start, self._read = self._read, len(self._tokens)
        return now[len(before) :]

    def finish(self) -> str:
        """See `Detokenizer`."""
        before, now = self._text(self._read), self._text()
        self._start = self._read = len(self._tokens)
        return now[len(before) :]


def no_template(name: str) -> RoomError:
    """The refusal of a chat where there is no template."""
    return RoomError(
        "this model's tokenizer has no chat template",
        code="request_rejected",
        where="messages",
        actual=name,
        hint="Use /v1/completions or /generate.",
    )


def tokenizer_of(options: Mapping[str, Any], facts: ModelFacts) -> Tokenizer:
    """The tokenizer in the engine's checkpoint folder (`path`), or a byte-level one where there is none.

    Raises `ConfigError` for a tokenizer that is there and cannot be read.
    """
    folder = options.get("path")
    if isinstance(folder, str):
        if any((Path(folder) / name).is_file() for name in TOKENIZER_FILES):
            return CheckpointTokenizer(folder)
        log.warning(
            "%s has no tokenizer (none of %s): text is read and written as bytes, which this model was not trained on;"
            " send input_ids, or save its tokenizer there",
            folder,
            ", ".join(TOKENIZER_FILES),
        )
    return ByteTokenizer(facts.vocab_size, facts.eos_token)
