"""A peer of the `nixl` backend whose ports keep silent: found out before the one thread that serves all waits."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from sglang_pd.backends.library.process import own_identity
from sglang_pd.backends.nixl import backend as nixl_backend
from sglang_pd.backends.nixl.backend import NixlBackend
from sglang_pd.backends.nixl.blob import ENVELOPE, AgentBlob, agent_name
from sglang_pd.backends.nixl.options import NixlOptions
from sglang_pd.backends.nixl.reach import MAX_LISTENS, Listens, check_answers, listening, stated
from sglang_pd.protocol.errors import TransferError
from sglang_pd.testing import BackendSpec
from sglang_pd.testing.cases_bytes import exact, one_item
from sglang_pd.testing.lab import MIB, Lab


@pytest.fixture
def silent() -> Iterator[Listens]:
    """Somebody listens, and takes no connection: the system drops what asks for one."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        held = [socket.socket() for _ in range(8)]
        for one in held:
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        yield listener.getsockname()
        for one in held:
            one.close()


@pytest.fixture
def open_port() -> Iterator[Listens]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()


def refusing() -> Listens:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where: Listens = listener.getsockname()
    return where


def test_a_peer_is_refused_where_some_address_is_silent_and_none_takes_a_connection(silent: Listens) -> None:
    for listens in ([silent], [refusing(), silent], [silent, refusing()]):
        with pytest.raises(TransferError, match="nobody answers") as caught:
            check_answers(listens, "far", 0.2)
        assert caught.value.code == "peer_lost" and str(silent[1]) in str(caught.value.actual)


def test_one_connection_is_enough_and_refusals_are_the_librarys_to_judge(silent: Listens, open_port: Listens) -> None:
    for listens in ([open_port], [silent, open_port], [open_port, silent], [refusing()], []):
        check_answers(listens, "far", 5.0)


def test_stated_is_what_is_new_and_bound_to_an_address(open_port: Listens) -> None:
    before = listening()
    assert open_port in before.values()
    with socket.create_server(("127.0.0.1", 0)) as new, socket.create_server(("", 0)) as anywhere:
        assert anywhere.getsockname() in listening().values()
        assert stated(before, listening()) == [new.getsockname()]
    many = {number: ("127.0.0.1", number) for number in range(1, MAX_LISTENS + 2)}
    assert stated((), many) == [] and len(stated((1,), many)) == MAX_LISTENS


class Unasked:
    """An engine that must not be asked to connect."""

    calls = 0

    def call(self, function: Any) -> Any:
        self.calls += 1
        raise TransferError("the engine was asked")

    def tell(self) -> None: ...


@pytest.mark.parametrize("rdma", [False, True])
def test_the_engine_is_not_asked_to_connect_to_who_keeps_silent(
    silent: Listens, monkeypatch: pytest.MonkeyPatch, rdma: bool
) -> None:
    monkeypatch.setattr(nixl_backend, "ANSWER_S", 0.2)
    monkeypatch.setattr(nixl_backend, "rdma_devices", lambda: ("mlx5_0",) if rdma else ())
    backend: Any = object.__new__(NixlBackend)
    backend._options, backend.settings, backend._epoch, backend._closed = NixlOptions(), {}, 6, False
    backend._engine = engine = Unasked()
    monkeypatch.setattr(NixlBackend, "_check_open", lambda self: None)
    monkeypatch.setattr(NixlBackend, "_transport_to", lambda self, body: "tcp")
    monkeypatch.setattr(NixlBackend, "_writes_itself", lambda self, body: False)
    blob = AgentBlob(
        epoch=5, agent=agent_name(5, 0), nixl_version="1.5.1", plugin="UCX", settings=0, process=own_identity(),
        host_paths=["tcp"], listens=[silent], segments=[], metadata=b"",
    )  # fmt: skip
    monkeypatch.setattr(NixlBackend, "_decode", lambda self, data, epoch: blob)
    backend._closed = True  # nothing to close when it is forgotten
    with pytest.raises(TransferError, match="the engine was asked" if rdma else "nobody answers"):
        backend.start_connect(b"", 5).wait()
    assert engine.calls == rdma, "with RDMA, UCX may never connect there"


def test_an_agent_states_where_it_listens_and_being_tried_there_costs_it_nothing() -> None:
    lab = Lab(BackendSpec(name="nixl", env={"UCX_TLS": "tcp,self"}))
    try:
        link = lab.fresh((MIB,), (MIB,))
        listens = ENVELOPE.open(link.target.call("describe")).listens
        assert listens
        for where in listens:
            for _ in range(200):
                with socket.create_connection(where, 5.0):
                    pass
        exact(link, one_item(link, 65536), 1, "after its ports were tried")
        assert link.target.call("revoke", epoch=12345, within_s=20.0)["proven"]
        fresh = ENVELOPE.open(link.target.call("describe"))
        assert fresh.agent == agent_name(link.target.epoch, 1)
        for where in fresh.listens:
            with socket.create_connection(where, 5.0):
                pass
        assert fresh.listens
    finally:
        lab.close()
