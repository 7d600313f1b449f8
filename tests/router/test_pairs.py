"""Which pair gets a request, what policies see, where workers come from. The workers are fakes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest
from support.fake_workers import Cluster, FakeWorker, cluster, until

from sglang_pd.config import Address, load_router, parse_url
from sglang_pd.config.schema import RouterBreaker
from sglang_pd.protocol.errors import ConfigError
from sglang_pd.router import DnsResolver, Router, Target
from sglang_pd.router.fleet import Fleet, Wanted
from sglang_pd.router.policy import policy_named
from sglang_pd.router.worker import PeerBook, PeerView, Sight, Worker


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 50))


def known(cluster: Cluster, fake: FakeWorker) -> Worker:
    return next(worker for worker in cluster.router.fleet.workers if worker.url == fake.url)


# Pairs and policies


def peer(fake: FakeWorker, stage: str, **changed: Any) -> dict[str, Any]:
    entry = {"instance": fake.instance, "epoch": fake.epoch, "role": "prefill", "stage": stage, "address": ""}
    return {**entry, **changed}


def test_a_refused_pair_gets_nothing() -> None:
    async def test() -> None:
        def judge(workers: Sequence[FakeWorker]) -> None:
            p0, p1, d0, d1 = workers
            d0.peers = [peer(p0, "refused"), peer(p1, "agreed")]
            d1.peers = [peer(p0, "calling"), peer(p1, "refused")]

        async with cluster(prefills=2, decodes=2, prepare=judge) as c:
            for _ in range(12):
                assert (await c.generate()).status_code == 200
            at = {body["bootstrap_room"]: fake.instance for fake in c.prefills for _, body, _ in fake.asked}
            met = {(at[body["bootstrap_room"]], fake.instance) for fake in c.decodes for _, body, _ in fake.asked}
            assert met == {("p1", "d0"), ("p0", "d1")}
            shown = (await c.client.get("/workers")).json()["pairs"]
            assert Counter(pair["verdict"] for pair in shown) == {"refused": 2, "accepted": 1, "unknown": 1}
            c.decodes[0].peers = [peer(c.prefills[0], "refused"), peer(c.prefills[1], "refused")]
            c.decodes[1].peers = c.decodes[0].peers
            await until(lambda: c.router.fleet.ready() is not None)
            answer = await c.generate()
            assert answer.status_code == 503 and "accept each other" in answer.json()["error"]["message"]

    run(test())


def test_a_verdict_on_a_former_life_refuses_nothing() -> None:
    async def test() -> None:
        def judge(workers: Sequence[FakeWorker]) -> None:
            workers[1].peers = [peer(workers[0], "refused", epoch="0123")]

        async with cluster(prepare=judge) as c:
            assert (await c.generate()).status_code == 200
            c.decode.peers = [peer(c.prefill, "refused", epoch=int(c.prefill.epoch, 16), instance="")]
            await until(lambda: c.router.fleet.ready() is not None)
            c.decode.peers = [*c.decode.peers, peer(c.prefill, "agreed")]
            await until(lambda: c.router.fleet.ready() is None)
            control = {"instance": "", "epoch": "", "address": "tcp://127.0.0.1:8998"}
            c.decode.peers = [peer(c.prefill, "lost", **control)]
            await c.looked()
            assert (await c.generate()).status_code == 200  # lost, and there is no other to prefer
            assert c.router.fleet.pairs()[0]["verdict"] == "lost"

    run(test())


def test_a_policy_sees_only_eligible_workers() -> None:  # RT-09
    async def test() -> None:
        async with cluster(prefills=3) as c:
            seen: list[set[str]] = []

            class Watching:
                def pick(self, workers: Sequence[Worker]) -> Worker:
                    seen.append({worker.url for worker in workers})
                    return workers[0]

            c.router.fleet._policy_prefill = Watching()
            c.prefills[1].ready_status = (503, {"status": "draining"})
            await until(lambda: known(c, c.prefills[1]).sight.draining)
            assert (await c.generate()).status_code == 200
            assert seen == [{c.prefills[0].url, c.prefills[2].url}]

    run(test())


@pytest.mark.parametrize("policy", ["least_rooms", "round_robin"])
def test_policies_spread(policy: str) -> None:
    async def test() -> None:
        async with cluster(decodes=3, policy=policy) as c:
            for _ in range(9):
                assert (await c.generate()).status_code == 200
            assert [len(fake.asked) for fake in c.decodes] == [3, 3, 3]
            c.decodes[0].hold = asyncio.Event()
            stuck = asyncio.create_task(c.generate(text=["a", "b", "c", "d"]))
            while not (c.decodes[0].open_rooms or stuck.done()):
                await asyncio.sleep(0.01)
            before = [len(fake.asked) for fake in c.decodes]
            tasks = [asyncio.create_task(c.generate()) for _ in range(4)]
            await until(lambda: sum(len(fake.asked) for fake in c.decodes) == sum(before) + 4)
            c.decodes[0].hold.set()
            await asyncio.gather(stuck, *tasks)
            more = [len(fake.asked) - then for fake, then in zip(c.decodes, before, strict=True)]
            assert more == ([0, 2, 2] if policy == "least_rooms" else [1, 2, 1])

    run(test())


def test_the_caller_may_name_the_prefill() -> None:
    async def test() -> None:
        async with cluster(prefills=2) as c:
            for worker, port in zip(c.router.fleet.of("prefill"), (7001, 7002), strict=True):
                worker.bootstrap_port = port
            for _ in range(3):
                answer = await c.generate(bootstrap_host="127.0.0.1", bootstrap_port=7002)
                assert answer.status_code == 200
            assert len(c.prefills[1].asked) == 3
            answer = await c.generate(bootstrap_host="10.0.0.1")
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "$.bootstrap_host"

    run(test())


# Where workers are


def test_workers_come_and_go_with_the_resolver() -> None:
    async def test() -> None:
        async with cluster(decodes=2) as c:
            targets = {fake: Target("decode", parse_url(fake.url, where="test")) for fake in c.decodes}
            prefill = Target("prefill", parse_url(c.prefill.url, where="test"), "127.0.0.1", 8998)

            class Changing:
                listed = [prefill, targets[c.decodes[0]]]

                async def resolve(self) -> Sequence[Target]:
                    return self.listed

            resolver = Changing()
            config = {"prefill": ["http://x"], "decode": ["http://x"], "timeouts": {"probe_s": 0.05}}
            async with Router(config, resolver) as router:
                await router.generate({"text": "a"})
                resolver.listed = [prefill, targets[c.decodes[1]]]
                await until(lambda: [w.url for w in router.fleet.of("decode")] == [c.decodes[1].url])
                await until(lambda: router.fleet.ready() is None)
                await router.generate({"text": "a"})
                assert [len(fake.asked) for fake in c.decodes] == [1, 1]

    run(test())


def test_a_name_stands_for_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        answers: dict[str, list[str] | None] = {
            "many.test": ["127.0.0.2", "127.0.0.1", "127.0.0.1"],
            "six.test": ["::1"],
        }

        async def look_up(host: str, port: int, **_: Any) -> Any:
            found = answers[host]
            if found is None:
                raise OSError("no such name")
            return [(None, None, None, "", (text, port)) for text in found]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
        config = {"prefill": [{"url": "http://many.test:30000", "bootstrap_port": 9}], "decode": ["http://six.test:1"]}
        resolver = DnsResolver(load_router({**config, "resolve": "dns"}))
        found = list(await resolver.resolve())
        assert [(t.url, t.bootstrap_host, t.bootstrap_port) for t in found] == [
            ("http://127.0.0.1:30000", "127.0.0.1", 9),
            ("http://127.0.0.2:30000", "127.0.0.2", 9),
            ("http://[::1]:1", "", 0),
        ]
        answers["many.test"] = None
        assert list(await resolver.resolve()) == found  # what it had
        answers["many.test"] = ["127.0.0.3"]
        assert [t.url for t in await resolver.resolve()] == ["http://127.0.0.3:30000", "http://[::1]:1"]

    run(test())
    with pytest.raises(ConfigError, match=r"\$\.prefill\[0\]\.bootstrap_host"):
        config = {"prefill": [{"url": "http://a", "bootstrap_host": "b"}], "decode": ["http://c"], "resolve": "dns"}
        DnsResolver(load_router(config))


def test_dns_end_to_end() -> None:
    async def test() -> None:
        async with cluster() as c:
            lists = {fake.role: [fake.url.replace("127.0.0.1", "localhost")] for fake in c.workers()}
            async with Router({**lists, "resolve": "dns", "timeouts": {"probe_s": 0.05}}) as router:
                assert any("127.0.0.1" in worker.url for worker in router.fleet.workers)
                assert (await router.generate({"text": "a"}))["text"] == "decode0:xxx"

    run(test())


def test_the_port_is_asked_for_where_none_is_configured() -> None:  # CF-08
    async def test() -> None:
        async with cluster() as c:
            c.prefill.info = {"disaggregation_bootstrap_port": 4711}
            await c.looked()
            assert (await c.generate()).status_code == 200
            assert c.decode.asked[-1][1]["bootstrap_port"] == 8998  # configured: used, with a warning
            prefill = {"url": c.prefill.url, "bootstrap_port": 0}
            async with Router({"prefill": [prefill], "decode": [c.decode.url]}) as router:
                await router.generate({"text": "a"})
                assert c.decode.asked[-1][1]["bootstrap_port"] == 4711

    run(test())


def test_a_large_fleet_is_chosen_from_without_a_walk_over_all_pairs() -> None:
    """300 by 300 with every verdict known: counted, not timed."""
    fleet = Fleet((policy_named("least_rooms"), policy_named("least_rooms")), RouterBreaker())
    roles: tuple[Any, ...] = ("prefill", "decode")
    fleet.update(Target(role, Address(f"{role}{i}", 80), f"{role}{i}", 9) for role in roles for i in range(300))
    for number, worker in enumerate(fleet.workers):
        worker.sight = Sight(up=True, ready=True, reason="")
        worker.identify(f"{number:x}", worker.url)
    book = PeerBook(PeerView(w.url, w.incarnation.epoch, "", "agreed") for w in fleet.of("prefill"))
    asked = 0

    class Counting(PeerBook):
        def about(self, identity: Any, control: Any) -> list[PeerView]:
            nonlocal asked
            asked += 1
            return book.about(identity, control)

    for worker in fleet.of("decode"):
        worker.peers = Counting()
    pair = fleet.choose(Wanted())
    assert pair.prefill.role == "prefill" and pair.decode.role == "decode"
    assert asked <= 600 and len(book.about(pair.prefill_life, ("", 0))) == 2  # by epoch and by name
