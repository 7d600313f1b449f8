"""Bodies: what is taken, and what is refused by name."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from sglang_pd.protocol.errors import RoomError
from sglang_pd.protocol.room import Role
from sglang_pd.server.bodies import (
    NEUTRAL,
    Body,
    ChatBody,
    CompletionBody,
    GenerateBody,
    SamplingParams,
    decode,
)
from sglang_pd.server.rooms import places


def refused(call: Any, *arguments: Any) -> str:
    with pytest.raises(RoomError) as caught:
        call(*arguments)
    assert caught.value.code == "request_rejected" and caught.value.http_status == 400
    return str(caught.value)


ROUTER_BODY = {
    "text": "hello", "model": None, "sampling_params": {"max_new_tokens": 4}, "return_text_in_logprobs": False,
    "stream": False, "log_metrics": True, "return_hidden_states": False, "background": False, "no_logs": False,
    "return_bytes": False, "return_entropy": False, "bootstrap_host": "127.0.0.1", "bootstrap_port": 8998,
    "bootstrap_room": 6613341960509426607,
}  # fmt: skip
"""What sglang-router 0.3.2 posts for `{"text": "hello", "sampling_params": {"max_new_tokens": 4}}`."""


def test_what_the_sglang_router_sends_is_taken() -> None:
    body = decode(json.dumps(ROUTER_BODY).encode(), GenerateBody)
    assert (body.text, body.bootstrap_room, body.bootstrap_port) == ("hello", 6613341960509426607, 8998)
    chat = {
        "messages": [{"role": "user", "content": "hi"}], "model": "m", "logprobs": False, "max_completion_tokens": 3,
        "stream": False, "no_stop_trim": False, "ignore_eos": False, "continue_final_message": False,
        "skip_special_tokens": True, "separate_reasoning": True, "stream_reasoning": True,
        "return_hidden_states": False, "bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 1,
    }  # fmt: skip
    assert decode(json.dumps(chat).encode(), ChatBody).max_completion_tokens == 3


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not an object"),
        (b'{"text": "a", "x": ' + b"[" * 100_000, "not JSON"),
        (b"[1]", "not an object"),
        (b'{"text": 1}', "body.text"),
        (b'{"text": "a", "stream": "yes"}', "body.stream"),
        (b'{"text": "a", "bootstrap_room": -1}', "body.bootstrap_room"),
        (b'{"text": "a", "bootstrap_room": 9223372036854775808}', "body.bootstrap_room"),
        (b'{"text": "a", "bootstrap_port": 70000}', "body.bootstrap_port"),
        (b'{"input_ids": [1, -2]}', "body.input_ids[1]"),
        (b'{"text": "a", "image_data": "x"}', "body.image_data"),
        (b'{"text": "a", "lora_path": "x"}', "body.lora_path"),
        (b'{"text": "a", "streem": true}', "Did you mean 'stream'"),
    ],
)
def test_a_bad_body_is_refused_by_name(raw: bytes, said: str) -> None:
    assert said in refused(decode, raw, GenerateBody)


BOMBS = {
    "lists": b'{"a": [' + b"[]," * 300_000 + b"1]}",
    "lists that do not matter": b'{"user": [' + b"[]," * 300_000 + b"1]}",
    "an unsupported value": b'{"min_p": [' + b"[]," * 300_000 + b"1]}",
    "a key": b'{"' + b"ab" * 500_000 + b'": 1}',
    "parameters": b'{"text": "a", "sampling_params": [' + b"{}," * 400_000 + b"{}]}",
    "rids": b'{"text": "a", "rid": [' + b'"",' * 400_000 + b'""]}',
    "a rid": b'{"text": "a", "rid": "' + b"r" * 1_000_000 + b'"}',
    "a wrong element": b'{"input_ids": [' + b"1," * 500_000 + b"-1]}",
    "a number": b'{"text": "a", "bootstrap_room": ' + b"9" * 1_000_000 + b"}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_body_costs_a_few_times_its_bytes_and_its_refusal_is_short(name: str) -> None:
    """Nothing is made of fields that are not ours: 32 MiB of empty lists once held the process for twelve seconds, and
    other clients' rooms failed."""
    tracemalloc.start()
    try:
        decode(BOMBS[name], GenerateBody)
    except RoomError as error:
        assert error.code == "request_rejected" and len(str(error)) < 400
    else:
        assert name == "lists that do not matter"
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 10 * len(BOMBS[name])


@pytest.mark.parametrize("rid", ["r" * 257, "a\nb", "a\x00", "\u2028", ["ok", "\x7f"]])
def test_a_rid_is_a_short_line(rid: Any) -> None:
    """It goes into records, logs and dumps."""
    said = refused(decode, json.dumps({"text": "a", "rid": rid}).encode(), GenerateBody)
    assert "body.rid" in said and ("no control characters" in said or "length <= 256" in said)
    assert decode(b'{"text": "a", "rid": "0a-\xc3\xa9 _"}', GenerateBody).rid == "0a-\xe9 _"


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"temperature": -1}, "sampling_params.temperature"),
        ({"top_p": 0}, "sampling_params.top_p"),
        ({"top_k": -2}, "sampling_params.top_k"),
        ({"max_new_tokens": 0}, "sampling_params.max_new_tokens"),
        ({"n": 0}, "sampling_params.n"),
        ({"stop": [""]}, "sampling_params.stop"),
        ({"stop_token_ids": [-1]}, "sampling_params.stop_token_ids"),
        ({"json_schema": "{}"}, "sampling_params.json_schema"),
        ({"frequency_penalty": 0.5}, "expected 0, got 0.5"),
        ({"max_tokens": 3}, "Did you mean"),
    ],
)
def test_sampling_that_cannot_be_done_is_refused_by_name(params: dict[str, Any], said: str) -> None:
    with pytest.raises(RoomError) as caught:
        decode(json.dumps(params).encode(), SamplingParams, where="sampling_params")
    assert said in str(caught.value)


def test_neutral_values_of_unsupported_fields_are_taken() -> None:
    for key, values in NEUTRAL.items():
        for value in (*values, None, False, ""):
            decode(json.dumps({key: value}).encode(), SamplingParams)


def test_completions_refuse_what_they_cannot_tell() -> None:
    assert "body.logprobs" in refused(decode, b'{"prompt": "a", "logprobs": 21}', CompletionBody)
    assert "body.prompt" in refused(decode, b'{"prompt": {"a": 1}}', CompletionBody)


# Rooms: SGLang's scalars and lists


def rooms_of(prompts: int, answers: int, **fields: Any) -> list[tuple[int, str]]:
    fields = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, **fields}
    return [(p.room, p.address) for p in places(Body(**fields), Role.DECODE, prompts, answers)]


def test_one_room_counts_on_for_every_sequence() -> None:
    assert [room for room, _ in rooms_of(2, 3, bootstrap_room=10)] == [10, 11, 12, 13, 14, 15]


def test_a_list_names_every_sequence_or_every_prompt() -> None:
    assert [room for room, _ in rooms_of(2, 1, bootstrap_room=[7, 3])] == [7, 3]
    assert [room for room, _ in rooms_of(2, 2, bootstrap_room=[7, 3])] == [7, 8, 3, 4]
    assert [room for room, _ in rooms_of(2, 2, bootstrap_room=[7, 3, 1, 2])] == [7, 3, 1, 2]


def test_hosts_and_ports_go_with_their_prompts() -> None:
    found = rooms_of(2, 2, bootstrap_room=[10, 20], bootstrap_host=["10.0.0.1", "::1"], bootstrap_port=[1, None])
    assert [address for _, address in found] == ["tcp://10.0.0.1:1"] * 2 + ["tcp://[::1]:8998"] * 2
    assert rooms_of(1, 1, bootstrap_room=1, bootstrap_host="[fe80::1%eth0]")[0][1] == "tcp://[fe80::1%eth0]:8998"


@pytest.mark.parametrize(
    ("prompts", "answers", "fields", "said"),
    [
        (1, 1, {}, "decode worker"),
        (2, 1, {"bootstrap_room": [1, 1]}, "overlap"),
        (2, 2, {"bootstrap_room": [1, 2]}, "overlap"),
        (1, 2, {"bootstrap_room": 2**63 - 1}, "overflow"),
        (2, 1, {"bootstrap_room": [1]}, "not a room for each sequence"),
        (1, 1, {"bootstrap_room": 1, "bootstrap_host": None}, "prefill's control"),
        (1, 1, {"bootstrap_room": 1, "bootstrap_host": "a b"}, "bootstrap_host"),
        (1, 1, {"bootstrap_room": 1, "bootstrap_host": "host:1"}, "bootstrap_host"),
        (2, 1, {"bootstrap_room": 1, "bootstrap_port": [1]}, "bootstrap_port"),
        (2000, 1, {"bootstrap_room": 1}, "too many sequences"),
    ],
)
def test_impossible_rooms_are_refused(prompts: int, answers: int, fields: dict[str, Any], said: str) -> None:
    assert said in refused(lambda: rooms_of(prompts, answers, **fields))


def test_prefill_needs_no_host() -> None:
    assert places(Body(bootstrap_room=5), Role.PREFILL, 1, 2)[1].room == 6
