"""Answers through two workers: SGLang's and OpenAI's shapes, equal to the model run whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.serving import Oracle, Pair

from sglang_pd.engines.base import Sampling
from sglang_pd.server.tokenizer import tokenizer_of

GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
PROMPT = [5, 6, 7, 8, 9]


def generated(pair: Pair, body: dict[str, Any], sequences: int = 1) -> tuple[Any, Any]:
    prefill, decode = pair.post("/generate", body, sequences)
    assert (prefill.status_code, decode.status_code) == (200, 200), (prefill.text, decode.text)
    return prefill.json(), decode.json()


def events(text: str) -> list[Any]:
    """Server-sent events, the last of which must say that it is over."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 200])
def test_tokens_are_those_of_the_model_run_whole(pair: Pair, oracle: Oracle, length: int) -> None:
    prompt = [(7 * i + length) % 248 + 3 for i in range(length)]
    prefill, decode = generated(
        pair, {"input_ids": prompt, "sampling_params": GREEDY, "return_logprob": True, "rid": "me"}
    )  # fmt: skip
    want = oracle.scored(prompt, 6)
    assert decode["output_ids"] == [token for token, _ in want]
    assert decode["meta_info"]["output_token_logprobs"] == [[logprob, token, None] for token, logprob in want]
    assert prefill["output_ids"] == decode["output_ids"][:1]
    meta = decode["meta_info"]
    assert meta["id"] == "me" and meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (length, 6, 0)
    assert meta["input_token_logprobs"] == [] and meta["e2e_latency"] > 0
    assert prefill["meta_info"]["completion_tokens"] == 1 and prefill["meta_info"]["id"] == "me"


@pytest.mark.parametrize("stream", [False, True])
def test_the_likeliest_tokens_are_told_the_first_ones_by_prefill(pair: Pair, oracle: Oracle, stream: bool) -> None:
    params = {"temperature": 0.9, "sampling_seed": 5, "max_new_tokens": 4, "ignore_eos": True}
    body = {"input_ids": PROMPT, "return_logprob": True, "top_logprobs_num": 3, "return_text_in_logprobs": True}
    answers = pair.post("/generate", {**body, "sampling_params": params, "stream": stream})
    prefill, decode = (events(one.text)[-1] if stream else one.json() for one in answers)
    tops = decode["meta_info"]["output_top_logprobs"]
    for place, top in enumerate(tops):
        (greedy,) = oracle.scored(PROMPT + decode["output_ids"][:place], 1)
        assert (top[0][1], top[0][0]) == pytest.approx(greedy) and len(top) == len({token for _, token, _ in top}) == 3
        assert [logprob for logprob, _, _ in top] == sorted((logprob for logprob, _, _ in top), reverse=True)
        chosen, least = decode["meta_info"]["output_token_logprobs"][place], top[-1][0]
        assert chosen in top or chosen[0] <= least
    assert len(tops) == 4 and prefill["meta_info"]["output_top_logprobs"] == tops[:1]
    for wrong in ({"logprob_start_len": 0}, {"return_logprob": False}, {"top_logprobs_num": 21}):
        refused = pair.post("/generate", {**body, **wrong})[1]
        assert refused.status_code == 400 and "top_logprobs_num" in refused.text


def test_sampling_goes_on_where_prefill_stopped(pair: Pair, oracle: Oracle) -> None:
    params = {"temperature": 0.9, "top_p": 0.9, "top_k": 30, "sampling_seed": 11, "max_new_tokens": 8}
    params["ignore_eos"] = True
    _, decode = generated(pair, {"input_ids": PROMPT, "sampling_params": params})
    want = oracle.tokens(PROMPT, 8, Sampling(temperature=0.9, top_p=0.9, top_k=30, seed=11))
    assert decode["output_ids"] == want != oracle.tokens(PROMPT, 8)


def test_several_answers_draw_numbers_of_their_own(pair: Pair, oracle: Oracle) -> None:
    params = {"temperature": 1.0, "sampling_seed": 3, "max_new_tokens": 5, "n": 3, "ignore_eos": True}
    _, decode = generated(pair, {"input_ids": PROMPT, "sampling_params": params}, 3)
    assert [one["output_ids"] for one in decode] == [
        oracle.tokens(PROMPT, 5, Sampling(temperature=1.0, seed=3 + number)) for number in range(3)
    ]
    assert len({one["meta_info"]["bootstrap_room"] for one in decode}) == 3


def test_without_a_seed_answers_differ(pair: Pair) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
    assert len({tuple(generated(pair, body)[1]["output_ids"]) for _ in range(3)}) > 1


def test_a_batch_answers_prompt_by_prompt(pair: Pair, oracle: Oracle) -> None:
    prompts = [[5, 6], [7] * 70, [9]]
    body = {
        "input_ids": prompts,
        "sampling_params": [{**GREEDY, "max_new_tokens": 2 + number} for number in range(3)],
        "return_logprob": [False, True, False],
    }
    _, decode = generated(pair, body, 3)
    assert [one["output_ids"] for one in decode] == [oracle.tokens(p, 2 + n) for n, p in enumerate(prompts)]
    assert ["output_token_logprobs" in one["meta_info"] for one in decode] == [False, True, False]


def test_a_stream_is_the_answer_piece_by_piece(pair: Pair, oracle: Oracle) -> None:
    body = {"input_ids": PROMPT, "sampling_params": GREEDY, "stream": True, "return_logprob": True}
    prefill, decode = pair.post("/generate", body)
    assert decode.headers["content-type"].startswith("text/event-stream")
    found = events(decode.text)
    want = oracle.tokens(PROMPT, 6)
    assert [one["output_ids"] for one in found[:6]] == [want[: n + 1] for n in range(6)]
    assert [one["meta_info"]["finish_reason"] for one in found[:-1]] == [None] * (len(found) - 1)
    assert found[-1]["output_ids"] == want and found[-1]["meta_info"]["finish_reason"]["type"] == "length"
    assert len(events(prefill.text)) == 1


def test_streams_of_a_batch_are_numbered(pair: Pair, oracle: Oracle) -> None:
    body = {"input_ids": [[5, 6], [7]], "sampling_params": GREEDY, "stream": True}
    found = events(pair.post("/generate", body, 2)[1].text)
    last = {one["index"]: one["output_ids"] for one in found}
    assert last == {0: oracle.tokens([5, 6], 6), 1: oracle.tokens([7], 6)}


def test_prompt_logprobs_come_from_prefill(pair: Pair) -> None:
    body = {
        "input_ids": [[5, 6, 7, 8, 9], [5, 6, 7, 8, 9]], "sampling_params": GREEDY, "return_logprob": True,
        "logprob_start_len": [0, 3], "return_text_in_logprobs": True,
    }  # fmt: skip
    prefill, decode = generated(pair, body, 2)
    whole, part = (one["meta_info"]["input_token_logprobs"] for one in prefill)
    assert [entry[1] for entry in whole] == PROMPT and whole[0][0] is None and all(e[0] < 0 for e in whole[1:])
    assert part[1:] == whole[4:] and part[0] == [None, 8, "\x05"]
    assert all(one["meta_info"]["input_token_logprobs"] == [] for one in decode)


def test_text_in_and_out(pair: Pair) -> None:
    body = {"text": "hallo", "sampling_params": GREEDY}
    _, decode = generated(pair, body)
    assert decode["meta_info"]["prompt_tokens"] == 5 and isinstance(decode["text"], str)
    want = bytes(token - 3 for token in decode["output_ids"]).decode("utf-8", "replace")
    assert decode["text"] == want


def test_the_end_token_ends_and_is_not_text(pair: Pair, oracle: Oracle) -> None:
    prompt, tokens = PROMPT, oracle.tokens(PROMPT, 6)
    params = {**GREEDY, "stop_token_ids": [tokens[3]]}
    _, decode = generated(pair, {"input_ids": prompt, "sampling_params": params})
    assert decode["output_ids"] == tokens[:4]
    assert decode["meta_info"]["finish_reason"] == {"type": "stop", "matched": tokens[3]}
    assert decode["text"] == bytes(token - 3 for token in tokens[:3]).decode("utf-8", "replace")


def test_a_stop_string_ends_the_job_and_is_cut(pair: Pair, oracle: Oracle) -> None:
    tokens = oracle.tokens([20, 21], 40)
    whole = bytes(max(token - 3, 0) for token in tokens).decode("utf-8", "replace")
    stop = next(whole[i : i + 2] for i in range(4, len(whole) - 2) if whole[i : i + 2].isascii())
    params = {**GREEDY, "max_new_tokens": 40, "stop": [stop, "never seen"]}
    for trim in (True, False):
        _, decode = generated(
            pair, {"input_ids": [20, 21], "sampling_params": {**params, "no_stop_trim": not trim}}
        )  # fmt: skip
        end = whole.index(stop) + (0 if trim else len(stop))
        assert decode["text"] == whole[:end]
        assert decode["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert len(decode["output_ids"]) < 40
    assert pair.settled()


def test_completions(pair: Pair, oracle: Oracle) -> None:
    body = {"model": "any", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "logprobs": 0, "ignore_eos": True}
    _, decode = pair.post("/v1/completions", body)
    document = decode.json()
    want = oracle.scored(PROMPT, 4)
    assert document["object"] == "text_completion" and document["model"] == "reference"
    assert document["usage"] == {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
    (choice,) = document["choices"]
    assert choice["finish_reason"] == "length" and choice["index"] == 0
    assert choice["logprobs"]["token_logprobs"] == [logprob for _, logprob in want]
    assert choice["logprobs"]["top_logprobs"] is None
    (choice,) = pair.post("/v1/completions", {**body, "logprobs": 2})[1].json()["choices"]
    tops, texts = choice["logprobs"]["top_logprobs"], choice["logprobs"]["tokens"]
    assert [top[text] for top, text in zip(tops, texts, strict=True)] == [logprob for _, logprob in want]
    assert all(len(top) <= 2 and max(top.values()) == top[text] for top, text in zip(tops, texts, strict=True))


def test_completions_of_texts_with_several_answers_stream(pair: Pair) -> None:
    body = {
        "prompt": ["ab", "cde"], "max_tokens": 3, "n": 2, "stream": True, "seed": 4, "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    plain = pair.post("/v1/completions", {**body, "stream": False, "stream_options": None}, 4)[1].json()
    found = events(pair.post("/v1/completions", body, 4)[1].text)
    usage = found.pop()
    assert usage["choices"] == [] and usage["usage"] == plain["usage"]
    assert plain["usage"] == {"prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17}
    texts = ["", "", "", ""]
    for event in found:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in plain["choices"]]


def test_logprobs_of_a_stream_are_those_of_the_whole_answer_in_pieces(pair: Pair, monkeypatch: Any) -> None:
    looked: list[int] = []
    tokenizer = type(tokenizer_of({}, pair.decode.parts.facts))
    real = tokenizer.token_text
    monkeypatch.setattr(tokenizer, "token_text", lambda self, token: (looked.append(token), real(self, token))[1])
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, "logprobs": 0, "ignore_eos": True}
    (whole,) = pair.post("/v1/completions", body)[1].json()["choices"]
    looked.clear()
    pieces = [
        e["choices"][0]["logprobs"] for e in events(pair.post("/v1/completions", {**body, "stream": True})[1].text)
    ]
    for key in ("tokens", "text_offset", "token_logprobs"):
        assert sum((piece[key] for piece in pieces), []) == whole["logprobs"][key]
    lengths = [len(text) for text in whole["logprobs"]["tokens"]]
    assert whole["logprobs"]["text_offset"] == [sum(lengths[:number]) for number in range(len(lengths))]
    assert len(looked) == 30 + 1, "each token is looked at once, not once for every piece; prefill tells its one too"


def test_a_chat_needs_a_template(pair: Pair) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    for response in pair.post("/v1/chat/completions", body):
        assert response.status_code == 400 and "no chat template" in response.json()["error"]["message"]


def test_everything_was_given_back(pair: Pair) -> None:
    assert pair.settled()
    for service in (pair.prefill, pair.decode):
        service.parts.allocator.check_integrity()
