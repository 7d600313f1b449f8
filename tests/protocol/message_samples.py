"""One message of every type, every field away from its default: the source of the golden vectors of version 1."""

from __future__ import annotations

import numpy as np

from sglang_pd.protocol.errors import ErrorInfo
from sglang_pd.protocol.indices import pack_indices, prompt_digest
from sglang_pd.protocol.messages import (
    Abort,
    AbortAck,
    Admitted,
    Draining,
    Failed,
    Handoff,
    Heartbeat,
    Hello,
    HelloConfirm,
    HelloReply,
    LeaseRenew,
    Message,
    Mismatch,
    Queued,
    Refusal,
    RoomAccepted,
    RoomEnd,
    RoomOpen,
    RoomRefused,
    StatusQuery,
    StatusReply,
    Verdict,
    Writer,
    Wrote,
)

ROOM, GENERATION = 2**63 - 1, 2**40 + 3
EPOCH = 0xFEDC_BA98_7654_3210
ERROR = ErrorInfo(
    code="prompt_mismatch",
    message="prefill and decode hold different prompts",
    where="room 9",
    expected="5 tokens",
    actual="6 tokens",
    hint="send both legs the same body",
    details={"prefill": "5", "décode": "6"},
)
VERDICT = Verdict(
    accepted=False,
    mismatches=(
        Mismatch(component="KV", region="layer 3 part k", field="dtype", prefill="bf16", decode="fp16"),
        Mismatch(component="", region="", field="model", prefill="a", decode="b"),
    ),
)
WROTE = Wrote(
    room=ROOM,
    generation=GENERATION,
    writer=Writer(1, 7),
    component="QSA_PENDING",
    layer_start=2**32 - 2,
    layer_stop=2**32 - 1,
    token_start=64,
    token_stop=129,
    last=True,
    nbytes=2**40,
    digests=(2**64 - 2).to_bytes(8, "little"),
)
HANDOFF = Handoff(
    room=ROOM, generation=GENERATION, writer=Writer(1, 0), covered_tokens=129, record=b"\x82\xa1a\x01\xa1b\x02"
)
ACK = AbortAck(room=ROOM, generation=GENERATION, writer=Writer(0, 3), fenced=False, reason="status unknown")

SAMPLES: dict[str, Message] = {
    "hello": Hello(
        instance="decode-0",
        manifest=b"\x80",
        manifest_digest=2**64 - 1,
        packing_rules=(2, 1),
        heartbeat_ms=1_000,
        liveness_ms=10_000,
        software="sglang-pd 0.1.0",
        lost=(EPOCH, 2**64 - 1),
    ),
    "hello_reply": HelloReply(
        instance="prefill-0",
        manifest=b"\x81\xa1x\x00",
        manifest_digest=1,
        peer_epoch=EPOCH,
        peer_manifest_digest=2**64 - 1,
        verdict=VERDICT,
        plan_digest=0,
        packing_rule=1,
        heartbeat_ms=500,
        liveness_ms=1_000,
        software="sglang-pd 0.1.0",
        fenced=(2**64 - 1,),
        control=2**63 + 5,
    ),
    "hello_confirm": HelloConfirm(
        manifest_digest=2**64 - 1, peer_manifest_digest=1, verdict=Verdict(accepted=True), plan_digest=77
    ),
    "refusal": Refusal(error=ERROR, refused_type=16, room=ROOM, generation=GENERATION, fenced=(EPOCH,)),
    "room_open": RoomOpen(
        room=ROOM,
        generation=GENERATION,
        to_epoch=EPOCH,
        request_id="cmpl-1",
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        prompt_tokens=129,
        prompt_digest=prompt_digest(np.arange(129)),
        prefix_tokens=64,
        index_lists=(pack_indices(7, [9, 2, 2**32 - 1]), pack_indices(2**32 - 1, np.arange(100, 200))),
        ticket="opaque",
    ),
    "room_accepted": RoomAccepted(room=ROOM, generation=GENERATION, state="matched"),
    "room_refused": RoomRefused(room=ROOM, generation=GENERATION, error=ERROR),
    "queued": Queued(room=ROOM, generation=GENERATION, ahead=12),
    "wrote": WROTE,
    "handoff": HANDOFF,
    "room_end": RoomEnd(room=ROOM, generation=GENERATION, records=3),
    "failed": Failed(room=ROOM, generation=GENERATION, error=ERROR),
    "admitted": Admitted(room=ROOM, generation=GENERATION),
    "abort": Abort(room=ROOM, generation=GENERATION, error=ErrorInfo(code="room_aborted", message="client left")),
    "abort_ack": ACK,
    "status_query": StatusQuery(room=ROOM, generation=GENERATION, nonce=2**32 - 1, have=5, after=2),
    "status_reply": StatusReply(
        room=ROOM,
        generation=GENERATION,
        nonce=1,
        known=True,
        state="sent",
        first=2,
        total=3,
        wrote=(WROTE,),
        handoff=HANDOFF,
        ended=True,
        error=ERROR,
        acks=(ACK, AbortAck(room=ROOM, generation=GENERATION, writer=None, fenced=True)),
    ),
    "lease_renew": LeaseRenew(room=0, lease_ms=60_000),
    "heartbeat": Heartbeat(peer_epoch=EPOCH, seq=17, state="draining", rooms=4),
    "draining": Draining(deadline_ms=30_000, reason="SIGTERM"),
}
"""Vector name -> message."""
