"""The tokenizer that lies with a checkpoint: text piece by piece, chats by its own template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_pd.engines.base import ModelFacts
from sglang_pd.protocol.errors import ConfigError, RoomError
from sglang_pd.server.tokenizer import CheckpointTokenizer, tokenizer_of

TEXT = "Größe: 3 €, naïve 漢字 and 🙂 — done.\n"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if messages[0]['role'] == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizers: Any = pytest.importorskip("tokenizers")
    transformers: Any = pytest.importorskip("transformers")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator([TEXT], trainer)
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<s>", eos_token="</s>")
    path = tmp_path_factory.mktemp("checkpoint")
    made.chat_template = TEMPLATE
    made.save_pretrained(str(path))
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> CheckpointTokenizer:
    return CheckpointTokenizer(str(folder))


def test_text_comes_back_piece_by_piece(tokenizer: CheckpointTokenizer) -> None:
    stream, shown = tokenizer.detokenizer(), ""
    for token in tokenizer.encode(TEXT):
        piece = stream.add(token)
        assert "\ufffd" not in piece, "half a character was shown"
        shown += piece
    assert shown + stream.finish() == TEXT


def test_half_a_character_shows_at_the_end(tokenizer: CheckpointTokenizer) -> None:
    stream = tokenizer.detokenizer()
    single = [token for token in tokenizer.encode("é") if tokenizer.token_text(token) == "\ufffd"]
    if not single:
        pytest.skip("this vocabulary has the character as one token")
    assert (stream.add(single[0]), stream.finish()) == ("", "\ufffd")


def test_a_chat_follows_the_template(tokenizer: CheckpointTokenizer) -> None:
    tokens = tokenizer.chat([{"role": "user", "content": "naïve"}])
    stream = tokenizer.detokenizer()
    assert "".join(map(stream.add, tokens)) + stream.finish() == "user: naïve\nassistant:"
    with pytest.raises(RoomError, match="no such role") as caught:
        tokenizer.chat([{"role": "bad", "content": ""}])
    assert caught.value.http_status == 400


def test_who_serves_which(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    facts: Any = ModelFacts("f", None, 10, 300, 2)  # type: ignore[arg-type]
    assert tokenizer_of({"path": str(folder)}, facts).name == str(folder)
    assert not caplog.records
    assert tokenizer_of({"path": str(tmp_path)}, facts).name == tokenizer_of({}, facts).name == "bytes"
    assert [record.levelname for record in caplog.records] == ["WARNING"] and str(tmp_path) in caplog.text
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"\$\.engine\.options\.path"):
        tokenizer_of({"path": str(tmp_path)}, facts)
