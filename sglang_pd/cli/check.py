"""`sglang-pd check`: would these two workers accept each other? Nothing is started and nothing moves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.table import Table

from sglang_pd.cli.app import EXIT_NO
from sglang_pd.cli.output import JsonOption, SetOption, emit, emit_json, split_sets, table
from sglang_pd.config import WorkerConfig, load_worker
from sglang_pd.protocol.errors import ConfigError, PlanError
from sglang_pd.protocol.handshake import compare
from sglang_pd.protocol.messages import Mismatch, Verdict
from sglang_pd.protocol.pairing import Pairing
from sglang_pd.worker.serving.instances import Planned, plan_instance

FIELDS = ("component", "region", "field", "prefill", "decode")


def command(prefill: str, decode: str, sets: SetOption = [], as_json: JsonOption = False) -> int:  # noqa: B006
    """The verdict on two configurations, without traffic: accepted, or every difference by name."""
    pair = load_pair(prefill, decode, split_sets(sets))
    planned = plan_instance(pair[0]), plan_instance(pair[1])
    verdict = judge(*planned)
    proof = prove(*planned) if verdict.accepted else None
    accepted = verdict.accepted and proof is None
    if as_json:
        emit_json(
            {
                "accepted": accepted,
                "mismatches": verdict.mismatches,
                "error": proof.info() if proof is not None else None,
                "prefill": planned[0].manifest.instance_id,
                "decode": planned[1].manifest.instance_id,
                "kinds": planned[1].manifest.kinds,
            }
        )
    else:
        _print(planned, verdict, proof)
    return 0 if accepted else EXIT_NO


def load_pair(prefill: str, decode: str, sets: Mapping[str, tuple[str, ...]]) -> tuple[WorkerConfig, WorkerConfig]:
    """Both configurations, by role. Raises `ConfigError` when a file has the other role."""
    pair = load_worker(prefill, sets=sets["prefill"]), load_worker(decode, sets=sets["decode"])
    if (pair[0].role, pair[1].role) == ("decode", "prefill"):
        raise ConfigError(
            "the two configurations are in the wrong order",
            where="PREFILL DECODE",
            expected="prefill's file, then decode's",
            actual=f"{prefill} is decode's, {decode} is prefill's",
            hint="Swap the two.",
        )
    for config, role, path in zip(pair, ("prefill", "decode"), (prefill, decode), strict=True):
        if config.role != role:
            raise ConfigError("the wrong role", where="$.role", expected=role, actual=config.role, file=path)
    return pair


def judge(prefill: Planned, decode: Planned) -> Verdict:
    """The verdict that the workers themselves would reach, and what their configurations add to it."""
    found = (*compare(prefill.manifest, decode.manifest).mismatches, *_settings(prefill.config, decode.config))
    return Verdict(accepted=not found, mismatches=found)


def prove(prefill: Planned, decode: Planned) -> PlanError | None:
    """Compile all plans and prove that they write every byte once; the reason where that fails."""
    pairing = Pairing(prefill.manifest, decode.manifest)
    try:
        for rank in decode.manifest.ranks:
            pairing.prove(rank.rank)
    except PlanError as error:
        return error
    return None


def _settings(prefill: WorkerConfig, decode: WorkerConfig) -> Iterator[Mismatch]:
    """What two configurations must agree on and no manifest says."""
    facts: dict[str, tuple[object, object]] = {
        "security.curve": tuple("keys" if c.security.curve else "none" for c in (prefill, decode)),  # type: ignore[dict-item]
    }
    for option in ("plugin", "transport"):
        facts[f"backend.options.{option}"] = (
            prefill.backend.options.get(option, "default"),
            decode.backend.options.get(option, "default"),
        )
    for field, (one, other) in facts.items():
        if one != other:
            yield Mismatch(component="", region="", field=field, prefill=str(one)[:500], decode=str(other)[:500])
    ports: dict[tuple[str, int | None], tuple[str, str]] = {}
    for config in (prefill, decode):
        for name, address in (("bootstrap_port", config.bootstrap_address), ("http_port", config.http_address)):
            taken = ports.setdefault((address.host, address.port), (config.role, name))
            if address.port and taken[0] != config.role:
                text = f"{taken[0]} has {address} as {taken[1]}"
                yield Mismatch(component="", region="", field=f"network.{name}", prefill=text, decode=str(address))


def differences(verdict: Verdict) -> Table:
    """What keeps the two apart, one row each."""
    rows = [[getattr(m, field) for field in FIELDS] for m in verdict.mismatches]
    return table(f"{len(rows)} differences", FIELDS, rows)


def _print(planned: tuple[Planned, Planned], verdict: Verdict, proof: PlanError | None) -> None:
    names = " -> ".join(p.manifest.instance_id for p in planned)
    if verdict.accepted and proof is None:
        kinds = ", ".join(planned[1].manifest.kinds)
        emit(f"accepted: {names}", f"state that moves: {kinds}", "every live byte is written exactly once")
        return
    if proof is not None:
        emit(f"refused: {names}", str(proof))
        return
    emit(f"refused: {names}", differences(verdict))
