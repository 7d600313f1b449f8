"""The shipped Kubernetes configuration in three network and PID namespaces, and `local` where it must refuse."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deploy.files import DEPLOY, KUBERNETES, ROOT, document, documents, pod
from deploy.namespaces import CLI, ESTABLISHED, LISTEN, Host, Process, hosts, unavailable

REASON = unavailable()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(REASON), reason=REASON),
]
PORTS = {"prefill": (8998, 30000), "decode": (8999, 30001), "router": (8000, 8000)}
ROLES = ("prefill", "decode", "router")
TOKENS = {"WORKER_TOKEN": "between-us", "CLIENT_TOKEN": "from-outside"}
PROMPT = {"input_ids": [3, 1, 4, 1, 5, 9, 2, 6] * 9, "sampling_params": {"max_new_tokens": 6, "temperature": 0}}


def mounted_keys(folder: Path) -> dict[str, str]:
    """Each role's KEYS folder, filled by the pods' own init container from a Secret as it is mounted (mode 0440)."""
    for name in ("prefill", "decode"):
        subprocess.run([CLI, "keygen", name, "--folder", str(folder)], check=True, capture_output=True, timeout=60)
    found = {}
    for role in ("prefill", "decode"):
        secret, keys = folder / f"{role}-secret", folder / f"{role}-keys"
        secret.mkdir()
        keys.mkdir()
        (container,) = pod(KUBERNETES / f"{role}.yaml")["initContainers"]
        for word in container["command"]:
            if word.startswith("/secret/"):
                copied = shutil.copy(folder / Path(word).name, secret)
                Path(copied).chmod(0o440)
        places = {"/secret": str(secret), "/keys": str(keys)}
        command = [places.get(w, w.replace("/secret/", f"{secret}/")) for w in container["command"]]
        subprocess.run(command, check=True, timeout=30)
        found[role] = str(keys)
    return found


def containers(role: str) -> list[str]:
    """Arguments of a role's container, with the shipped configuration in the place of the mounted one."""
    (container,) = pod(KUBERNETES / f"{role}.yaml")["containers"]
    return [word.replace("/config/", f"{KUBERNETES}/config/") for word in container["args"]]


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Host], dict[str, Process]]]:
    """Prefill, decode and router as pods: names of Services resolve, nothing else is shared."""
    folder = tmp_path_factory.mktemp("pods")
    keys = mounted_keys(folder)
    with hosts(*ROLES) as at, contextlib.ExitStack() as stack:
        names = folder / "hosts"
        services = [f"{at[role].address} sglang-pd-{role}" for role in ROLES]
        names.write_text("\n".join(["127.0.0.1 localhost", *services]) + "\n")
        running = {}
        for role in ROLES:
            environment = {**TOKENS, "POD_IP": at[role].address, "KEYS": keys.get(role, "")}
            command = Process.inside(at[role], names, [CLI, *containers(role)])
            running[role] = stack.enter_context(Process(command, folder / f"{role}.log", environment))
        running["prefill"].wait_for('"event":"ready"')
        running["decode"].wait_for('"event":"ready"')
        running["router"].wait_for("sglang-pd router on")
        until_ready(at["router"])
        yield at, running


def until_ready(router: Host) -> None:
    deadline_s = time.monotonic() + 60
    while (answer := router.ask(f"http://{router.address}:8000/ready"))[0] != 200:
        assert time.monotonic() < deadline_s, answer
        time.sleep(0.5)


def test_a_request_crosses_three_namespaces(pods: Any) -> None:
    at, running = pods
    url = f"http://{at['router'].address}:8000/generate"
    status, text = at["router"].ask(url, PROMPT, f"Authorization: Bearer {TOKENS['CLIENT_TOKEN']}")
    assert status == 200, (text, running["prefill"].text()[-2000:], running["decode"].text()[-2000:])
    assert '"output_ids":[' in text and '"completion_tokens":6' in text
    assert at["router"].ask(url, PROMPT)[0] == 401
    for role in ("prefill", "decode"):
        probe = pod(KUBERNETES / f"{role}.yaml")["containers"][0]
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            path = probe[kind]["httpGet"]["path"]
            assert at[role].ask(f"http://{at[role].address}:{PORTS[role][1]}{path}")[0] == 200


def allowed_ports(role: str) -> dict[str, set[int]]:
    """Who may connect to which port of a role's pods, by the shipped NetworkPolicy: source role -> ports."""
    found: dict[str, set[int]] = {}
    for policy in documents(KUBERNETES / "networkpolicy.yaml"):
        if policy["metadata"]["name"] != f"sglang-pd-{role}":
            continue
        for rule in policy["spec"]["ingress"]:
            ports = {n for p in rule["ports"] for n in range(p["port"], p.get("endPort", p["port"]) + 1)}
            for source in rule.get("from", []):
                name = source["podSelector"]["matchLabels"]["app.kubernetes.io/name"].removeprefix("sglang-pd-")
                found.setdefault(name, set()).update(ports)
    return found


def test_the_network_policy_opens_what_is_used(pods: Any) -> None:
    at, _ = pods
    url = f"http://{at['router'].address}:8000/generate"
    assert at["router"].ask(url, PROMPT, f"Authorization: Bearer {TOKENS['CLIENT_TOKEN']}")[0] == 200
    by_address = {host.address: role for role, host in at.items()}
    data = 0
    for role in ("prefill", "decode"):
        listening = {port for _, port, _ in at[role].sockets(LISTEN)}
        declared = {*PORTS[role], *range(20000, 20100)}
        assert listening <= declared, f"{role} listens on {sorted(listening - declared)}, which nothing declares"
        allowed = allowed_ports(role)
        for _, port, remote in at[role].sockets(ESTABLISHED):
            source = by_address.get(remote, remote)
            if port in listening and source != role:
                assert port in allowed.get(source, set()), f"{source} -> {role}:{port} is used and not allowed"
                data += 20000 <= port < 20100
    assert data, "no connection of the data plane was seen"


def test_a_pod_that_is_told_to_end_drains(pods: Any) -> None:
    """SIGTERM reaches PID 1, which ends by itself, long before the pod would be killed. Last: it ends decode."""
    at, running = pods
    popen = running["decode"].popen
    (child,) = Path(f"/proc/{popen.pid}/task/{popen.pid}/children").read_text().split()
    subprocess.run(["kill", f"-{int(signal.SIGTERM)}", child], check=True, timeout=10)
    grace_s = pod(KUBERNETES / "decode.yaml")["terminationGracePeriodSeconds"]
    assert popen.wait(grace_s) == 0, running["decode"].text()[-2000:]
    assert "draining: told to by SIGTERM" in running["decode"].text()


def test_compose_runs_as_it_is_shipped(tmp_path: Path) -> None:
    """The services of compose.yaml, found by their names, each in namespaces of its own."""
    services = document(DEPLOY / "compose.yaml")["services"]
    with hosts(*ROLES) as at, contextlib.ExitStack() as stack:
        names = tmp_path / "hosts"
        names.write_text("\n".join(["127.0.0.1 localhost", *(f"{at[role].address} {role}" for role in ROLES)]) + "\n")
        running = {}
        for role in ROLES:
            words = [word.replace("/config/", f"{DEPLOY}/config/") for word in services[role]["command"]]
            command = Process.inside(at[role], names, [CLI, *words])
            running[role] = stack.enter_context(Process(command, tmp_path / f"{role}.log"))
        for role, said in (("prefill", '"event":"ready"'), ("decode", '"event":"ready"'), ("router", "router on")):
            running[role].wait_for(said)
        until_ready(at["router"])
        status, text = at["router"].ask(f"http://{at['router'].address}:8000/generate", PROMPT)
        assert status == 200 and '"completion_tokens":6' in text, (text, running["decode"].text()[-2000:])
        for role in ROLES:
            (url,) = re.findall(r"http://[^']+", services[role]["healthcheck"]["test"][-1])
            assert at[role].ask(url)[0] == 200


@pytest.mark.parametrize("shared", ["network", "pid"])
def test_local_refuses_what_it_cannot_prove(shared: str, tmp_path: Path) -> None:
    """`local` needs one PID namespace and one network namespace; with either alone the pair is refused by name."""
    with hosts("one", "two") as at, contextlib.ExitStack() as stack:
        places = {"prefill": at["one"], "decode": at["one" if shared == "network" else "two"]}
        names = tmp_path / "hosts"
        names.write_text("127.0.0.1 localhost\n")
        for role, host in places.items():
            config = ROOT / "configs" / f"local-{role}.yaml"
            bind = ["--set", f"network.bind={host.address}", "--set", "security.insecure=true"]
            command = Process.inside(host, names, [CLI, role, "--config", str(config), *bind], own_pids=shared != "pid")
            stack.enter_context(Process(command, tmp_path / f"{role}.log")).wait_for('"event":"ready"')
        prefill, decode = places["prefill"], places["decode"]
        body = {**PROMPT, "bootstrap_host": prefill.address, "bootstrap_port": 8998, "bootstrap_room": 77}
        status, text = decode.ask(f"http://{decode.address}:30001/generate", body)
        assert status != 200, text
        peers = decode.ask(f"http://{decode.address}:30001/peers")[1]
        assert "peer_incompatible" in text and "host_id" in text + peers, (text, peers)
