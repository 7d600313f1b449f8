"""Cases on peers that die, hang or come back."""

from __future__ import annotations

import time

from sglang_pd.testing.case import Figures, case
from sglang_pd.testing.cases_bytes import exact, one_item
from sglang_pd.testing.lab import MIB, ChildProcess, Lab, Link, RemoteRefusal, canaries, compare, require
from sglang_pd.testing.pattern import CANARY, canary_images, pages

LARGE = (64 * MIB,)
"""Segments of the cases that must catch a transfer in flight, in bytes."""

SLACK_S = 5.0
"""What a loaded machine may add to a promised time."""


def try_write(link: Link, nbytes: int, deadline_s: float, settle: bool = False) -> str:
    """Write one item to a peer that may be gone; the state it came to, or `refused`."""
    try:
        posted = link.post(one_item(link, nbytes), deadline_s=deadline_s)
    except RemoteRefusal as refusal:
        require(refusal.info.code in ("peer_lost", "transfer_failed"), f"refused as {refusal.info.code}")
        return "refused"
    ended = link.wait(posted["transfer"], deadline_s + SLACK_S, settle)
    if ended["state"] in ("failed", "unknown"):
        require(ended["error"] is not None, f"a {ended['state']} transfer names no cause")
    require(ended["quiesced"] is (ended["state"] in ("done", "failed")), f"quiesced is wrong for {ended['state']}")
    require(ended["source_free"] or not ended["quiesced"], "quiesced, and the source is still read")
    return str(ended["state"])


def unharmed(lab: Lab, writer: ChildProcess) -> None:
    """The survivor still serves a new peer."""
    target = lab.spawn((MIB,), device=lab.spec.dst_device)
    link = lab.connect(writer, target)
    exact(link, one_item(link, 8192), 200, "a new peer after another died")


@case
def peer_killed_before(lab: Lab) -> Figures:
    """A write to a peer that was killed before ends, within its deadline, in FAILED, UNKNOWN or a refusal."""
    link = lab.fresh((MIB,), (MIB,))
    link.move(one_item(link, 4096))
    link.target.kill()
    began = time.monotonic()
    state = try_write(link, 4096, 5.0)
    took = time.monotonic() - began
    require(state in ("failed", "unknown", "refused"), f"a write to a dead peer ended {state}")
    unharmed(lab, link.writer)
    return {"state": state, "seen_after_s": round(took, 3)}


@case
def peer_killed_during(lab: Lab) -> Figures:
    """A peer killed in the middle of transfers leaves none PENDING past its deadline, and the writer serves others."""
    link = lab.fresh(LARGE, LARGE)
    batch = pages(210, 2048, 16384, link.writer.sizes, link.target.sizes)
    link.move(batch)
    posted = [link.post(batch, deadline_s=5.0) for _ in range(8)]
    link.target.kill()
    states = [link.wait(one["transfer"], 5.0 + SLACK_S)["state"] for one in posted]
    require("pending" not in states, f"states after the deadline: {states}")
    after = try_write(link, 4096, 5.0)
    require(after != "done", "a write to the dead peer was DONE")
    unharmed(lab, link.writer)
    return {"states": ",".join(sorted(set(states)))}


@case
def peer_killed_after(lab: Lab) -> None:
    """After all was DONE, a peer's death changes no final state, and the writer's fence holds."""
    link = lab.fresh((MIB,), (MIB,))
    posted = link.post(one_item(link, 65536))
    require(link.wait(posted["transfer"])["state"] == "done", "a write to a live peer was not DONE")
    link.target.kill()
    time.sleep(0.1)
    require(link.wait(posted["transfer"], 1.0)["state"] == "done", "DONE did not stay DONE after the peer's death")
    require(link.fence(SLACK_S)["proven"], "nothing is in flight to a dead peer, and there is no fence")
    unharmed(lab, link.writer)


@case
def peer_stopped(lab: Lab) -> Figures:
    """A write to a stopped peer is not PENDING past its deadline, and never FAILED while bytes can still land."""
    link = lab.fresh((8 * MIB,), (8 * MIB,))
    link.move(one_item(link, 4096))
    canaries(link.target)
    link.target.stop()
    try:
        posted = link.post(one_item(link, 4 * MIB), deadline_s=1.0)
        ended = link.wait(posted["transfer"], 1.0 + SLACK_S)
    finally:
        link.target.resume()
    state = ended["state"]
    require(state != "pending", "PENDING past its deadline")
    require(ended["quiesced"] is (state in ("done", "failed")), f"quiesced is wrong for {state}")
    require(ended["source_free"] is ended["quiesced"], "the transport says that it let go of what it may still read")
    if state == "unknown":
        require("timeout" in ended["error"]["code"] or "unknown" in ended["error"]["code"], "UNKNOWN for what reason?")
        ended = link.wait(posted["transfer"], 10.0, settle=True)
    if ended["state"] == "done":
        expected = link.writer.call("read", segment=0, offset=0, nbytes=4 * MIB)
        require(link.target.call("read", segment=0, offset=0, nbytes=4 * MIB) == expected, "DONE, and bytes are wrong")
    proven = link.fence(10.0)["proven"]
    require(proven or not ended["quiesced"], "all transfers are quiesced and there is no fence")
    if proven:
        canaries(link.target)
        late = link.target.call("watch", segment=0, nbytes=8 * MIB, value=CANARY, for_s=0.3)
        require(late < 0, f"a byte landed after the fence, at offset {late}")
    return {"at_deadline": state, "later": ended["state"], "fence": str(proven)}


@case
def peer_restarted(lab: Lab) -> Figures:
    """A peer restarted at its address with new memory is a new peer; what is sent to the old never lands there."""
    writer = lab.spawn((MIB,), device=lab.spec.src_device)
    old = lab.spawn((MIB,), device=lab.spec.dst_device, options=lab.spec.restart_options)
    before = lab.connect(writer, old)
    exact(before, one_item(before, 65536), 220, "before the restart")
    old.kill()
    new = lab.spawn((2 * MIB,), device=lab.spec.dst_device, options=lab.spec.restart_options)
    canaries(new)
    state = try_write(before, 65536, 3.0)
    require(state != "done", "a write to the dead incarnation was DONE")
    compare(new, canary_images(new.sizes), "a write to the old incarnation")
    after = lab.connect(writer, new)
    exact(after, one_item(after, 65536, 0, MIB + 4096), 221, "after the restart")
    return {"to_the_old": state}


@case
def writer_restarted(lab: Lab) -> None:
    """A writer that died and came back connects anew to a peer that never stopped."""
    link = lab.fresh((MIB,), (MIB,))
    exact(link, one_item(link, 65536), 230, "the first writer")
    link.writer.kill()
    again = lab.connect(lab.spawn((MIB,), device=lab.spec.src_device), link.target)
    exact(again, one_item(again, 65536), 231, "the second writer")
