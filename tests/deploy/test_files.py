"""Images, compose files and manifests against the real command line and the real schema: flags, ports, paths, times."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deploy.files import DEPLOY, KUBERNETES, ROOT, document, documents, of_kind, parse_command_line, pod, walk

from sglang_pd.cli.keygen import command as keygen
from sglang_pd.config import RouterConfig, WorkerConfig, load_keys, load_router, load_worker
from sglang_pd.router.app import OPEN_PATHS
from sglang_pd.router.serve import CUT_S, STOP_S
from sglang_pd.server.app import ROUTES
from sglang_pd.worker.serving.service import FENCE_WAIT_S

SPARE_S = 30
ENVIRON = {"POD_IP": "10.1.2.3", "KEYS": "/keys", "WORKER_TOKEN": "w", "CLIENT_TOKEN": "c"}
COMPOSE = ("compose.yaml", "compose.local.yaml")
ROLES = ("prefill", "decode", "router")
toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
PROJECT = toml.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
Loaded = WorkerConfig | RouterConfig


def load(path: Path, sets: tuple[str, ...] = ()) -> Loaded:
    reads = load_worker if "role" in document(path) else load_router
    return reads(path, sets=sets, environ=ENVIRON)


def http_port(config: Loaded) -> int:
    port = config.port if isinstance(config, RouterConfig) else config.http_address.port
    assert port
    return port


def server_end_s() -> int:
    """How long a worker's server lets requests end once the drain is over."""
    text = (ROOT / "sglang_pd/server/serve.py").read_text(encoding="utf-8")
    (found,) = re.findall(r"timeout_graceful_shutdown=(\d+)", text)
    return int(found)


def needed_s(config: Loaded, pre_stop_s: int = 0) -> float:
    if isinstance(config, RouterConfig):
        return pre_stop_s + STOP_S + CUT_S
    return pre_stop_s + config.liveness.drain_s + FENCE_WAIT_S + server_end_s()


def compose_config(service: dict[str, Any]) -> Loaded:
    """A service's configuration, as its own command line and volumes name it."""
    role, options = parse_command_line([re.sub(r"\$\{\w+:-(\w+)\}", r"\1", word) for word in service["command"]])
    (volume,) = service["volumes"]
    outside, inside, mode = volume.split(":")
    assert mode == "ro" and str(options["config"]) == inside, "the file that is mounted is the one that is read"
    config = load((DEPLOY / outside).resolve(), tuple(options["sets"]))
    assert role == getattr(config, "role", "router")
    return config


@pytest.mark.parametrize("name", COMPOSE)
def test_compose_services_start_with_what_is_mounted(name: str) -> None:
    services = document(DEPLOY / name)["services"]
    assert set(ROLES) <= set(services)
    for role in ROLES:
        service, config = services[role], compose_config(services[role])
        grace_s = int(service["stop_grace_period"].removesuffix("s"))
        assert needed_s(config) < grace_s <= needed_s(config) + SPARE_S
        assert service["image"].startswith("sglang-pd:") and service["build"]["dockerfile"] == "deploy/Dockerfile"
        assert (DEPLOY / service["build"]["context"] / "deploy/Dockerfile").resolve().is_file()
        assert set(service["build"]["args"]) <= set(arguments())
    published = (services["namespaces"] if "namespaces" in services else services["router"])["ports"]
    assert published == [f"127.0.0.1:8000:{http_port(compose_config(services['router']))}"]


def test_compose_over_nixl_keeps_namespaces_apart_and_ports_open() -> None:
    services = document(DEPLOY / "compose.yaml")["services"]
    for role in ROLES:
        service, config = services[role], compose_config(services[role])
        assert not {"pid", "network_mode", "ipc"} & set(service)
        probe = service["healthcheck"]["test"][-1]
        assert f":{http_port(config)}/ready" in probe and "/ready" in OPEN_PATHS
        compile(probe, role, "single")
        if isinstance(config, WorkerConfig):
            assert config.advertised_host == role == service["hostname"]
            assert set(service["expose"]) == {
                str(http_port(config)),
                str(config.bootstrap_address.port),
                config.network.ports,
            }
            assert config.backend.name == service["build"]["args"]["BACKEND"] == "nixl"
    router = compose_config(services["router"])
    assert isinstance(router, RouterConfig)
    for side, workers in (("prefill", router.prefill_workers), ("decode", router.decode_workers)):
        assert [w.url for w in workers] == [f"http://{side}:{http_port(compose_config(services[side]))}"]
    assert router.prefill_workers[0].bootstrap_port == 8998


def test_compose_over_local_shares_what_local_needs() -> None:
    services = document(DEPLOY / "compose.local.yaml")["services"]
    for role in ROLES:
        for shared in ("pid", "network_mode", "ipc"):
            assert services[role][shared] == "service:namespaces", f"{role}: {shared}"
        if role != "router":
            config = compose_config(services[role])
            assert isinstance(config, WorkerConfig) and config.backend.name == "local"
    assert services["namespaces"]["ipc"] == "shareable"
    gpus = document(DEPLOY / "compose.gpu.yaml")["services"]
    assert set(gpus) == {"prefill", "decode"} and all("devices" in str(service) for service in gpus.values())


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("**/config/*.yaml")), ids=lambda p: str(p.relative_to(DEPLOY)))
def test_configurations_load(path: Path) -> None:
    config = load(path)
    assert getattr(config, "role", "router") == path.stem
    with pytest.raises(Exception, match="no such key"):
        load(path, ("netwrok.bind=1",))


@pytest.mark.parametrize("role", ROLES)
def test_pods_agree_with_their_configuration(role: str) -> None:
    path, config = KUBERNETES / f"{role}.yaml", load(KUBERNETES / "config" / f"{role}.yaml")
    spec = pod(path)
    (container,) = spec["containers"]
    name, options = parse_command_line(container["args"])
    assert (name, str(options["config"])) == (role, f"/config/{role}.yaml")
    assert {m["mountPath"] for m in container["volumeMounts"]} >= {"/config"}
    ports = {p["name"]: p["containerPort"] for p in container["ports"]}
    assert ports["http"] == http_port(config)
    used = set(re.findall(r"\$\{env:(\w+)\}", (KUBERNETES / "config" / f"{role}.yaml").read_text()))
    assert used == {e["name"] for e in container["env"]}, "the pod sets what its configuration reads"
    served = OPEN_PATHS & ({r for r, _, _ in ROUTES} if role != "router" else OPEN_PATHS)
    for probe, wanted in (("startupProbe", "/health"), ("livenessProbe", "/health"), ("readinessProbe", "/ready")):
        got = container[probe]["httpGet"]
        assert got == {"path": wanted, "port": "http"} and wanted in served, "probes carry no token"
    scrape = of_kind(path, "Deployment")["spec"]["template"]["metadata"]["annotations"]
    assert (scrape["prometheus.io/port"], scrape["prometheus.io/path"]) == (str(ports["http"]), "/metrics")
    pre_stop = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
    needed = needed_s(config, int(pre_stop[1]))
    assert needed < spec["terminationGracePeriodSeconds"] <= needed + SPARE_S
    service = of_kind(path, "Service")["spec"]
    labels = of_kind(path, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    assert {p["port"] for p in service["ports"]} == set(ports.values())
    if isinstance(config, WorkerConfig):
        assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"] is True
        assert ports["control"] == config.bootstrap_address.port and config.security.curve is not None
        assert config.advertised_host == ENVIRON["POD_IP"]


def test_the_router_finds_the_headless_services() -> None:
    router = load(KUBERNETES / "config/router.yaml")
    assert isinstance(router, RouterConfig) and router.resolve == "dns" and router.worker_bearer_token == "w"
    for role, workers in (("prefill", router.prefill_workers), ("decode", router.decode_workers)):
        config = load(KUBERNETES / "config" / f"{role}.yaml")
        name = of_kind(KUBERNETES / f"{role}.yaml", "Service")["metadata"]["name"]
        assert [w.url for w in workers] == [f"http://{name}:{http_port(config)}"]
        assert isinstance(config, WorkerConfig) and config.security.bearer_token == "w"
    assert router.prefill_workers[0].bootstrap_port == 8998


def test_the_network_policy_opens_the_configured_ports() -> None:
    policies = {d["metadata"]["name"]: d["spec"] for d in documents(KUBERNETES / "networkpolicy.yaml")}
    for role in ("prefill", "decode"):
        config = load(KUBERNETES / "config" / f"{role}.yaml")
        assert isinstance(config, WorkerConfig)
        policy = policies[f"sglang-pd-{role}"]
        assert (
            policy["podSelector"]["matchLabels"].items()
            <= of_kind(KUBERNETES / f"{role}.yaml", "Deployment")["spec"]["selector"]["matchLabels"].items()
        )
        opened = {(p["port"], p.get("endPort", p["port"])) for rule in policy["ingress"] for p in rule["ports"]}
        control = {(config.bootstrap_address.port,) * 2} if role == "prefill" else set()
        assert opened == {(http_port(config),) * 2, config.network.port_range, *control}
        assert all(rule.get("from") for rule in policy["ingress"]), "nobody but the named"
    assert policies["sglang-pd-router"]["ingress"][0]["ports"][0]["port"] == http_port(
        load(KUBERNETES / "config/router.yaml")
    )


def test_secrets_are_what_keygen_makes(tmp_path: Path) -> None:
    for name in ("prefill", "decode"):
        assert keygen(name, folder=str(tmp_path)) == 0
    generators = {g["name"]: g for g in document(KUBERNETES / "kustomization.yaml")["secretGenerator"]}
    for role in ("prefill", "decode"):
        spec = pod(KUBERNETES / f"{role}.yaml")
        (volume,) = [v for v in spec["volumes"] if v["name"] == "secret"]
        files = [Path(name).name for name in generators[volume["secret"]["secretName"]]["files"]]
        copied = [Path(w).name for w in spec["initContainers"][0]["command"] if w.startswith("/secret/")]
        assert sorted(files) == sorted(copied) and all((tmp_path / name).is_file() for name in files)
        assert not any(name.endswith("_secret") and not name.startswith(role) for name in files), "its own secret only"
        config = load_worker(KUBERNETES / "config" / f"{role}.yaml", environ={**ENVIRON, "KEYS": str(tmp_path)})
        assert load_keys(config.security) is not None
    assert "keys/" in (KUBERNETES / ".gitignore").read_text().split()


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_builds_and_every_reference_resolves(tmp_path: Path) -> None:
    root = shutil.copytree(KUBERNETES, tmp_path / "k", ignore=shutil.ignore_patterns("keys"))
    (root / "keys").mkdir()
    for name in ("prefill", "decode"):
        keygen(name, folder=str(root / "keys"))
    (root / "keys/tokens.env").write_text("WORKER_TOKEN=w\nCLIENT_TOKEN=c\n")
    for folder in (root, root / "multi-node"):
        built = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, timeout=60)
        assert built.returncode == 0, built.stderr.decode()
        (folder / "built").write_bytes(built.stdout)
        made = documents(folder / "built")
        names = {(d["kind"], d["metadata"]["name"]) for d in made}
        for found in walk(made):
            for kind, key, field in (
                ("ConfigMap", "configMap", "name"),
                ("Secret", "secret", "secretName"),
                ("Secret", "secretKeyRef", "name"),
            ):
                if isinstance(found.get(key), dict):
                    assert (kind, found[key][field]) in names, f"{found} names what is not there"


def test_the_multi_node_template_agrees_with_itself() -> None:
    found = {d["kind"]: d for d in documents(KUBERNETES / "multi-node/leaderworkerset.yaml")}
    group = found["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    leader, worker = group["leaderTemplate"]["spec"], group["workerTemplate"]["spec"]
    config = load(KUBERNETES / "multi-node/config/prefill.yaml")
    assert isinstance(config, WorkerConfig)
    ranks = sum(pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for pod in (leader, worker))
    assert (group["size"], ranks) == (2, config.topology.tp * config.topology.pp)
    ports = {p["name"]: p["containerPort"] for p in leader["containers"][0]["ports"]}
    assert (ports["http"], ports["control"]) == (http_port(config), config.bootstrap_address.port)
    policy = found["NetworkPolicy"]["spec"]["ingress"][0]
    assert policy["ports"][0]["port"] == ports["ranks"]
    for spec in (leader, worker):
        assert needed_s(config) < spec["terminationGracePeriodSeconds"] <= needed_s(config) + SPARE_S


def test_the_multi_node_check_accepts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from sglang_pd.cli.check import command as check

    monkeypatch.setenv("POD_IP", "10.1.2.3")
    group = of_kind(KUBERNETES / "multi-node/leaderworkerset.yaml", "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    _, options = parse_command_line(group["leaderTemplate"]["spec"]["initContainers"][0]["args"])
    folder = KUBERNETES / "multi-node/config"
    named = [str(folder / Path(options[side]).name) for side in ("prefill", "decode")]
    assert check(*named) == 0, capsys.readouterr().out


# The image


def dockerfile() -> str:
    return (DEPLOY / "Dockerfile").read_text(encoding="utf-8")


def arguments() -> dict[str, str]:
    return dict(re.findall(r"^ARG (\w+)=(.*)$", dockerfile(), re.MULTILINE))


def test_the_image_installs_extras_that_exist() -> None:
    from sglang_pd.backends.registry import BACKENDS

    (body,) = re.findall(r'case "\$BACKEND" in(.*?)esac', dockerfile(), re.DOTALL)
    backends = [b for names in re.findall(r"^\s+([a-z0-9|-]+)\)", body, re.MULTILINE) for b in names.split("|")]
    extras = PROJECT["project"]["optional-dependencies"]
    assert {b.removesuffix("-cpu").removesuffix("-cuda13") for b in backends} == set(BACKENDS) - {
        "faulty"
    }  # which a test of this process may have added
    assert set(backends) - {"local"} <= set(extras) and {"server", "cuda", arguments()["ENGINE"]} <= set(extras)
    assert arguments()["BACKEND"] in backends
    setup = (ROOT / "scripts/setup.sh").read_text(encoding="utf-8")
    needed = set(re.findall(r"^needs \S+ (\S+) +# mooncake", setup, re.MULTILINE))
    (packages,) = re.findall(r'mooncake\|mooncake-cuda13\|mooncake-cpu\) packages="([^"]+)"', body)
    assert needed and needed <= set(packages.split()), "the same Debian packages as scripts/setup.sh"
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"TORCH ?= {arguments()['TORCH']}" in makefile


def test_the_image_has_all_sources_and_the_entry_point() -> None:
    copied = {w for line in re.findall(r"^COPY (.+)$", dockerfile(), re.MULTILINE) for w in line.split()[:-1]}
    project = PROJECT["project"]
    folders = set(PROJECT["tool"]["setuptools"]["package-dir"].values())
    assert copied == {"pyproject.toml", project["readme"], *project["license-files"], *folders}
    ignore = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    assert {f"!{name}" for name in copied} <= set(ignore)
    assert '["sglang-pd"]' in dockerfile() and "sglang-pd" in project["scripts"]
    user = re.findall(r"^USER (\d+)$", dockerfile(), re.MULTILINE)
    assert user == [str(pod(KUBERNETES / "prefill.yaml")["securityContext"]["runAsUser"])]


def test_an_option_that_does_not_exist_is_noticed() -> None:
    with pytest.raises(Exception, match="No such option"):
        parse_command_line(["prefill", "--confg", "/config/prefill.yaml"])
