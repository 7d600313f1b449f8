"""Text to tokens and back, and what a vocabulary is too small for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pd.protocol.errors import RoomError
from sglang_pd.server.tokenizer import BYTE_VALUES, ByteTokenizer


@given(st.text())
def test_any_text_survives_a_small_vocabulary(text: str) -> None:
    tokenizer = ByteTokenizer(vocab_size=248, eos_token=2)
    tokens = tokenizer.encode(text) if all(not 0xD800 <= ord(c) < 0xE000 for c in text) else []
    stream = tokenizer.detokenizer()
    shown = "".join(stream.add(token) for token in tokens) + stream.finish()
    assert shown == (text if tokens else "")
    assert all(3 <= token < 248 for token in tokens)


@pytest.mark.parametrize("eos", [-1, 0, 2, 3, 100, 247, 248, 150_000])
def test_no_byte_is_the_end_token(eos: int) -> None:
    tokenizer = ByteTokenizer(vocab_size=1000, eos_token=eos)
    assert eos not in tokenizer.encode("".join(map(chr, range(0xD7FF))))


def test_a_vocabulary_without_room_for_the_text_is_named() -> None:
    tokenizer = ByteTokenizer(vocab_size=130, eos_token=2)
    assert tokenizer.encode("abc") == [100, 101, 102]
    with pytest.raises(RoomError, match=f"expected {BYTE_VALUES + 3} tokens for any text, got 130") as caught:
        tokenizer.encode("é")
    assert caught.value.http_status == 400


def test_characters_come_whole() -> None:
    tokenizer = ByteTokenizer(vocab_size=300, eos_token=2)
    stream = tokenizer.detokenizer()
    assert [stream.add(token) for token in tokenizer.encode("aé€")] == ["a", "", "é", "", "", "€"]
    first, second, _ = tokenizer.encode("€")
    assert (stream.add(first), stream.add(second), stream.finish()) == ("", "", "\ufffd")
    assert tokenizer.token_text(first) == "\ufffd" and tokenizer.token_text(0) == ""


def test_there_is_no_chat_without_a_template() -> None:
    with pytest.raises(RoomError, match="no chat template"):
        ByteTokenizer(300, 2).chat([{"role": "user", "content": "hi"}])
