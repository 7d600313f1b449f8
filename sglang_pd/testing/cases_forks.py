"""The case of a process that forks while it is connected: the fork shares its sockets, and speaks for nobody."""

from __future__ import annotations

from sglang_pd.testing.case import Figures, case
from sglang_pd.testing.cases_bytes import exact, one_item
from sglang_pd.testing.cases_fence import stays_clean
from sglang_pd.testing.lab import MIB, ChildProcess, Lab, require
from sglang_pd.testing.pattern import batch_to_wire, pages


def fork_and_close(process: ChildProcess, peer: int, batch: dict[str, bytes], threaded: bool) -> None:
    """Let a process fork, and demand that the fork was refused everything and ended by itself."""
    found = process.call("fork", peer=peer, batch=batch, threaded=threaded)
    require(found["status"] == 0, f"a fork that closes everything ended with {found['status']}: {found['words']}")
    require(not found["accepted"], f"a fork was not refused: {found['accepted']}")
    if peer:
        require(found["state"] == "done", f"a transfer that was posted before a fork ended {found['state']}")
        require(found["seen"] in ("unknown", "done"), f"a fork says of its parent's transfer: {found['seen']}")


@case
def fork_leaves_all_to_its_parent(lab: Lab) -> Figures:
    """A fork is refused every call; when it closes everything, its parent goes on, and nothing is proven of that."""
    link = lab.fresh((8 * MIB,), (8 * MIB,))
    batch = pages(370, 256, 16384, link.writer.sizes, link.target.sizes)
    link.move(batch)
    wire = batch_to_wire(batch)
    for threaded in (False, True):
        fork_and_close(link.writer, link.peer, wire, threaded)
        fork_and_close(link.target, 0, wire, threaded)
    exact(link, batch, 371, "after both forked")
    exact(lab.connect(link.writer, link.target), one_item(link, 65536), 372, "connected after both forked")
    declared = link.target.capabilities
    within_s = 1.0 if declared["revoke_proof"] in ("pidfd", "none") else min(declared["revoke_within_s"], 5.0)
    link.writer.start("stream", {"peer": link.peer, "batch": wire, "for_s": within_s + 2.0})
    asked = link.target.call("revoke", epoch=link.writer.epoch, within_s=within_s)
    if asked["proven"]:
        require(declared["revoke_proof"] not in ("pidfd", "none"), "a living writer is proven harmless by its fork")
        stays_clean(link, 0.5, "after revoke of a writer that has forked")
    link.writer.answer("stream")
    return {"proven": str(asked["proven"])}
