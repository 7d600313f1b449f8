"""Cases on proof: after a fence or a revocation says True, no byte lands; where there is no proof, none is claimed."""

from __future__ import annotations

import time

from sglang_pd.testing.case import Figures, case
from sglang_pd.testing.cases_bytes import exact, one_item
from sglang_pd.testing.cases_peers import LARGE, SLACK_S
from sglang_pd.testing.lab import MIB, CaseSkipped, Lab, Link, RemoteRefusal, canaries, require
from sglang_pd.testing.pattern import CANARY, batch_to_wire, pages


def stays_clean(link: Link, for_s: float, what: str) -> None:
    """Re-own the destination: fill it with canaries and demand that they stay."""
    canaries(link.target)
    unchanged(link, for_s, what)


def unchanged(link: Link, for_s: float, what: str) -> None:
    """Demand that the canaries in the destination stay."""
    for number, size in enumerate(link.target.sizes):
        late = link.target.call("watch", segment=number, nbytes=size, value=CANARY, for_s=for_s)
        require(late < 0, f"{what}: a byte landed at offset {late} of segment {number}")


@case
def clean_drain(lab: Lab) -> Figures:
    """When every transfer is DONE, the writer's fence is True within 1 s."""
    link = lab.shared()
    for seed in range(3):
        link.move(pages(300 + seed, 100, 16384, link.writer.sizes, link.target.sizes))
    asked = link.fence(1.0)
    require(asked["proven"], "everything is DONE and the fence is not True within 1 s")
    return {"took_ms": round(asked["took_s"] * 1e3, 3)}


@case
def no_byte_after_fence(lab: Lab) -> Figures:
    """Memory re-owned after `fence` said True, asked with transfers in flight, stays as its new owner left it."""
    link = lab.fresh(LARGE, LARGE)
    batch = pages(310, 2048, 16384, link.writer.sizes, link.target.sizes)
    slowest = 0.0
    for _ in range(4):
        posted = [link.post(batch, deadline_s=20.0) for _ in range(3)]
        asked = link.fence(10.0)
        require(asked["proven"], "three transfers to a live peer, and no fence within 10 s")
        slowest = max(slowest, asked["took_s"])
        stays_clean(link, 0.15, "after the fence")
        for one in posted:
            ended = link.wait(one["transfer"], 0.0)
            require(ended["state"] == "done", f"live peer, fence True, and a transfer is {ended['state']}")
    return {"slowest_fence_ms": round(slowest * 1e3, 1)}


@case
def cancelled_before_its_event(lab: Lab) -> Figures:
    """A transfer cancelled behind its event is FAILED soon and never lands, unless it was handed over already."""
    link = lab.shared()
    batch = pages(315, 64, 16384, link.writer.sizes, link.target.sizes)
    link.move(batch)
    canaries(link.target)
    held = link.writer.call("write_held", peer=link.peer, batch=batch_to_wire(batch), deadline_s=60.0)
    link.writer.call("cancel", transfer=held)
    ended = link.wait(held, SLACK_S)
    given_up = ended["state"] != "pending"
    if given_up:
        require(ended["state"] == "failed", f"a cancelled transfer is {ended['state']} before its event")
        require(ended["error"]["code"] == "transfer_failed", f"cancelled, and it failed as {ended['error']['code']}")
        require(link.fence(1.0)["proven"], "the only transfer under way was cancelled, and no fence")
    link.writer.call("happen", transfer=held)
    if given_up:
        unchanged(link, 0.3, "after the event of a cancelled transfer")
    else:
        require(link.wait(held)["state"] == "done", "cancelled without effect, and not DONE behind its event")
    return {"cancelled": "given up" if given_up else "handed over already"}


@case
def cancelled_under_way(lab: Lab) -> Figures:
    """To cancel a transfer that is DONE, or under way, changes nothing of it."""
    link = lab.shared()
    batch = pages(316, 128, 16384, link.writer.sizes, link.target.sizes)
    canaries(link.target)
    posted = link.post(batch)
    link.writer.call("cancel", transfer=posted["transfer"])
    state = link.wait(posted["transfer"])["state"]
    require(state in ("done", "failed"), f"a transfer to a live peer is {state} after it was cancelled")
    if state == "failed":
        unchanged(link, 0.3, "a transfer that was cancelled in time")
        posted = link.post(batch)
        require(link.wait(posted["transfer"])["state"] == "done", "a write after a cancelled one was not DONE")
    link.writer.call("cancel", transfer=posted["transfer"])
    require(link.wait(posted["transfer"])["state"] == "done", "DONE did not stay DONE after it was cancelled")
    exact(link, batch, 317, "after a cancelled transfer")
    return {"right_after_write": state}


@case
def writer_killed(lab: Lab) -> Figures:
    """After `kill -9` of a writer with transfers in flight, `revoke` gives its proof in time, or has declared none."""
    link = lab.fresh(LARGE, LARGE)
    declared = link.target.capabilities
    batch = pages(320, 2048, 16384, link.writer.sizes, link.target.sizes)
    link.writer.start("stream", {"peer": link.peer, "batch": batch_to_wire(batch), "for_s": 20.0})
    time.sleep(0.15)
    link.writer.kill()
    if declared["revoke_proof"] == "none":
        asked = link.target.call("revoke", epoch=link.writer.epoch, within_s=1.0)
        require(not asked["proven"], "a backend that declares no proof claims one")
        return {"proof": "none"}
    within_s = declared["revoke_within_s"]
    asked = link.target.call("revoke", epoch=link.writer.epoch, within_s=within_s + SLACK_S)
    require(asked["proven"], f"no proof {within_s} s (and {SLACK_S} s more) after the writer's death")
    stays_clean(link, 0.3, "after revoke")
    again = lab.connect(lab.spawn((MIB,), device=lab.spec.src_device), link.target)
    exact(again, one_item(again, 65536), 321, "a new writer after revoke")
    return {"proof": declared["revoke_proof"], "took_ms": round(asked["took_s"] * 1e3, 1)}


@case
def writer_killed_before_it_connected(lab: Lab) -> Figures:
    """A writer that was agreed with, and killed before it ever connected, leaves no memory without a proof."""
    wanted = [((MIB,), lab.spec.src_device), ((MIB,), lab.spec.dst_device)]
    writer, target = lab.spawn_many(wanted)
    blob = writer.call("describe")
    target.call("describe")
    target.call("admit", epoch=writer.epoch, blob=blob)
    writer.kill()
    declared = target.capabilities
    if declared["revoke_proof"] == "none":
        asked = target.call("revoke", epoch=writer.epoch, within_s=1.0)
        require(not asked["proven"], "a backend that declares no proof claims one")
        return {"proof": "none"}
    within_s = declared["revoke_within_s"]
    asked = target.call("revoke", epoch=writer.epoch, within_s=within_s + SLACK_S)
    require(asked["proven"], f"it never connected, is dead, and no proof within {within_s} s (and {SLACK_S} s more)")
    again = lab.connect(lab.spawn((MIB,), device=lab.spec.src_device), target)
    exact(again, one_item(again, 65536), 322, "a new writer after revoke")
    return {"proof": declared["revoke_proof"], "took_ms": round(asked["took_s"] * 1e3, 1)}


@case
def live_writer_revoked(lab: Lab) -> Figures:
    """`revoke` of a writer that lives and goes on writing is True only if its bytes land no more."""
    link = lab.fresh((8 * MIB,), (8 * MIB,))
    declared = link.target.capabilities
    batch = pages(330, 256, 16384, link.writer.sizes, link.target.sizes)
    # Where the proof is the writer's death (and over CMA, which no engine of this side sees) it rightly stays False.
    within_s = 0.5 if declared["revoke_proof"] in ("pidfd", "none") else min(declared["revoke_within_s"], 5.0)
    link.writer.start("stream", {"peer": link.peer, "batch": batch_to_wire(batch), "for_s": within_s + 2.0})
    time.sleep(0.1)
    asked = link.target.call("revoke", epoch=link.writer.epoch, within_s=within_s)
    if asked["proven"]:
        require(declared["revoke_proof"] != "none", "a proof is claimed where none is declared")
        stays_clean(link, 0.5, "after revoke of a live writer")
    link.writer.answer("stream")
    return {"proven": str(asked["proven"]), "took_ms": round(asked["took_s"] * 1e3, 1)}


@case
def revoked_and_admitted_again(lab: Lab) -> Figures:
    """An earlier proof says nothing of what a writer does after it was admitted again."""
    link = lab.fresh((8 * MIB,), (8 * MIB,))
    link.move(one_item(link, 65536))
    declared = link.target.capabilities
    if declared["revoke_proof"] in ("pidfd", "none"):
        raise CaseSkipped("a living writer is never proven harmless, as declared")
    within_s = declared["revoke_within_s"] + SLACK_S
    if not link.target.call("revoke", epoch=link.writer.epoch, within_s=within_s)["proven"]:
        raise CaseSkipped("this transport proves nothing of a living writer")
    # Admitted before it has the new blob: from now on it may come back at any moment.
    lab.admit(link.writer, link.target)
    again = lab.connect(link.writer, link.target)
    batch = pages(350, 256, 16384, again.writer.sizes, again.target.sizes)
    again.move(batch)
    again.writer.start("stream", {"peer": again.peer, "batch": batch_to_wire(batch), "for_s": 3.0})
    asked = again.target.call("revoke", epoch=again.writer.epoch, within_s=0.0)
    if asked["proven"]:
        stays_clean(again, 0.5, "after an answer that an earlier proof gave")
    again.writer.answer("stream")
    return {"at_once": str(asked["proven"])}


@case
def revoked_again_before_it_came_back(lab: Lab) -> None:
    """A writer that was admitted again and revoked again before it connected: its way in is closed."""
    link = lab.fresh((MIB,), (MIB,))
    link.move(one_item(link, 65536))
    declared = link.target.capabilities
    link.writer.call("disconnect", peer=link.peer)
    within_s = declared["revoke_within_s"] + SLACK_S
    if declared["revoke_proof"] == "none":
        raise CaseSkipped("no proof, as declared")
    if not link.target.call("revoke", epoch=link.writer.epoch, within_s=within_s)["proven"]:
        raise CaseSkipped("this transport proves nothing of a living writer, though it has disconnected")
    lab.admit(link.writer, link.target)
    address = link.target.call("describe")
    require(link.target.call("revoke", epoch=link.writer.epoch, within_s=within_s)["proven"], "it never came back")
    canaries(link.target)
    try:
        peer = link.writer.call("connect", blob=address, epoch=link.target.epoch)["peer"]
        posted = link.writer.call("write", peer=peer, batch=batch_to_wire(one_item(link, 65536)), deadline_s=2.0)
        link.writer.call("wait", transfer=posted["transfer"], within_s=3.0, settle=False)
    except RemoteRefusal:
        pass  # as it should
    late = link.target.call("watch", segment=0, nbytes=MIB, value=CANARY, for_s=0.5)
    require(late < 0, f"bytes of a revoked writer landed, the first at offset {late}")


@case
def revoke_never_connected(lab: Lab) -> None:
    """Revoking an incarnation that never was here does no harm to those that are."""
    link = lab.fresh((MIB,), (MIB,))
    if link.target.capabilities["revoke_scope"] == "backend":
        raise CaseSkipped("a revocation costs every connection, as declared")
    link.target.call("revoke", epoch=link.writer.epoch ^ 0xFF, within_s=0.5)
    exact(link, one_item(link, 65536), 340, "after revoking a stranger")
