"""What a worker's HTTP server and a router say to each other beside the requests: words that both must spell alike."""

from __future__ import annotations

from typing import Final

EPOCH_HEADER: Final = "x-sglang-pd-epoch"
"""On a request: the epoch that its room is pinned to, 16 hexadecimal digits; another incarnation refuses it. On every
answer: the epoch of the incarnation that gave it."""

STAGE_PREFILL, STAGE_TRANSFER, STAGE_DECODE = "prefill", "transfer", "decode"
"""Stages of a request as a router can tell them: prefill's leg; decode's leg before and after its first byte."""

CANCELLABLE: Final = (STAGE_PREFILL, STAGE_TRANSFER, STAGE_DECODE)
"""What a worker of ours declares as `cancellable` in `/server_info`: a client that goes away ends the request in any
stage. A router lets a leg in a stage that is missing run to its end, since dropping it would free nothing."""
