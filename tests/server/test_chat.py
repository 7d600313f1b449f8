"""`/v1/chat/completions`, where the tokenizer has a template."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.serving import Oracle, Pair

from sglang_pd.server import app
from sglang_pd.server.tokenizer import ByteTokenizer

MESSAGES = [{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
PROMPT = "be|hi|"


class Chatty(ByteTokenizer):
    """Bytes with a template."""

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.encode("".join(f"{message['content']}|" for message in messages))


@pytest.fixture
def chatty(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(app, "tokenizer_of", lambda options, facts: Chatty(facts.vocab_size, facts.eos_token))
    apps = {"prefill": app.build_app(pair.prefill), "decode": app.build_app(pair.decode)}
    yield replace(pair, apps=apps)


def body(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": MESSAGES, "temperature": 0, "max_tokens": 5, "ignore_eos": True, **more}


def test_an_answer(chatty: Pair, oracle: Oracle) -> None:
    _, decode = chatty.post("/v1/chat/completions", body(logprobs=True))
    document = decode.json()
    want = oracle.scored([byte + 3 for byte in PROMPT.encode()], 5)
    assert document["object"] == "chat.completion" and document["usage"]["prompt_tokens"] == len(PROMPT)
    (choice,) = document["choices"]
    assert choice["message"]["role"] == "assistant" and choice["finish_reason"] == "length"
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [logprob for _, logprob in want]
    assert all(entry["top_logprobs"] == [] for entry in choice["logprobs"]["content"])
    (choice,) = chatty.post("/v1/chat/completions", body(logprobs=True, top_logprobs=2))[1].json()["choices"]
    for entry in choice["logprobs"]["content"]:
        first, second = entry.pop("top_logprobs")
        assert first == entry and second["logprob"] <= first["logprob"]
    refused = chatty.post("/v1/chat/completions", body(top_logprobs=2))[1]
    assert refused.status_code == 400 and "top_logprobs" in refused.text


def test_a_stream_says_its_role_once_and_adds_up(chatty: Pair) -> None:
    whole = chatty.post("/v1/chat/completions", body())[1].json()["choices"][0]["message"]["content"]
    lines = chatty.post("/v1/chat/completions", body(stream=True))[1].text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta["content"] for delta in deltas) == whole
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_only_text_is_understood(chatty: Pair) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "x"}}]
    for response in chatty.post("/v1/chat/completions", body(messages=[{"role": "user", "content": parts}])):
        assert response.status_code == 400 and "image_url" in response.json()["error"]["actual"]
