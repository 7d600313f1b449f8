"""Cases on cost: nothing grows, nothing spins."""

from __future__ import annotations

import time

from sglang_pd.testing.case import Figures, case
from sglang_pd.testing.cases_bytes import one_item
from sglang_pd.testing.lab import MIB, Lab, require
from sglang_pd.testing.pattern import batch_to_wire

GROWTH_BYTES = 8 * MIB
IDLE_FOR_S = 1.5


@case
def nothing_grows(lab: Lab) -> Figures:
    """10,000 small transfers leave no more memory, descriptors or threads behind than the first 1,000 did."""
    link = lab.fresh((MIB,), (MIB,))
    batch = batch_to_wire(one_item(link, 64, 128, 4096))
    processes = {"writer": link.writer, "target": link.target}
    warm = link.writer.call("repeat", peer=link.peer, batch=batch, count=1000)
    before = {name: child.call("usage") for name, child in processes.items()}
    ran = link.writer.call("repeat", peer=link.peer, batch=batch, count=9000)
    after = {name: child.call("usage") for name, child in processes.items()}
    require(warm["done"] + ran["done"] == 10_000, f"{warm['done'] + ran['done']} of 10,000 transfers were DONE")
    for name in processes:
        grown = after[name]["resident_bytes"] - before[name]["resident_bytes"]
        require(grown < GROWTH_BYTES, f"the {name}'s resident memory grew by {grown:.0f} bytes in 9,000 transfers")
        for what in ("descriptors", "threads"):
            more = after[name][what] - before[name][what]
            require(more <= 0, f"the {name} has {more:.0f} more {what} after 9,000 transfers")
    return {"p50_us": round(ran["p50_s"] * 1e6, 1)}


@case
def idle_pair(lab: Lab) -> Figures:
    """A connected, idle pair uses less of a core than declared: 2 %, or more with a reason given."""
    link = lab.fresh((MIB,), (MIB,))
    link.move(one_item(link, 4096))
    time.sleep(0.2)
    shares = {}
    before = {name: child.call("usage") for name, child in (("writer", link.writer), ("target", link.target))}
    time.sleep(IDLE_FOR_S)
    for name, child in (("writer", link.writer), ("target", link.target)):
        declared = child.capabilities
        require(declared["idle_cpu"] <= 0.02 or declared["idle_reason"], "idle_cpu above 2 % gives no reason")
        used = (child.call("usage")["cpu_s"] - before[name]["cpu_s"]) / IDLE_FOR_S
        # CPU time is counted in ticks of 10 ms: two of them are noise.
        require(used <= declared["idle_cpu"] + 0.02 / IDLE_FOR_S, f"the idle {name} uses {used:.1%} of a core")
        shares[f"{name}_share"] = round(used, 4)
    return dict(shares)
