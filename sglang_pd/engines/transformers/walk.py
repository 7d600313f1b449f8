"""What a cache of the library holds, found by walking its layers: by attribute, never by the model's name.

A probe runs the model on a few tokens and compares each layer's attributes before and after. Every one that changed is
state: a tensor that a kind of `protocol.kinds` carries, a number that travels in the handoff record, or neither, and
then the model is refused with the layer and the attribute named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn

import torch

from sglang_pd.protocol.errors import ManifestError

PROBE: Final = (3, 2)
"""Tokens of the probe's two chunks."""

Path = tuple[str, int | None]
"""An attribute of a cache layer, and the key within it where it is a dict."""
Leaves = dict[Path, Any]
Role = Literal["tokens", "window", "slot"]

AXES: Final[dict[str, tuple[int, int]]] = {
    "keys": (0, 2),
    "values": (0, 2),
    "indexer_keys": (0, 1),
    "indexer_position_ids": (1, 2),
}
"""Tensors with a row for each token: the axes of request and token. Everything else is one state a request."""
STATES: Final = ("conv_states", "recurrent_states")


@dataclass(frozen=True)
class Carried:
    """One tensor of one cache layer, and the region that carries it.

    shape: of a row, [units, ...], which is all of a slot's state or one token. first: its first unit in the region
    (several tensors may share one). window: tokens that a sliding layer keeps, 0 for others. shared: every layer has
    the same values, so that the request has them once.
    """

    layer: int
    path: Path
    kind: str
    part: str
    role: Role
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int = 0
    window: int = 0
    shared: bool = False

    @property
    def name(self) -> str:
        """For messages."""
        return name_of(self.layer, self.path)

    def rows(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        """A request's rows in a batch: [tokens, *shape], or [*shape] of a slot's state. A view."""
        attribute = self.path[0]
        if attribute in ("keys", "values"):
            return tensor[number].transpose(0, 1)
        if attribute == "indexer_keys":
            return tensor[number].unsqueeze(1)
        if attribute == "indexer_position_ids":
            return tensor[:, number].transpose(0, 1).unsqueeze(1)
        return tensor[number]

    def whole(self, rows: list[torch.Tensor]) -> torch.Tensor:
        """The cache's tensor from rows of all requests of a batch, as many rows each. Dense."""
        stacked = torch.stack(rows)
        attribute = self.path[0]
        if attribute in ("keys", "values"):
            return stacked.transpose(1, 2).contiguous()
        if attribute == "indexer_keys":
            return stacked.squeeze(2).contiguous()
        if attribute == "indexer_position_ids":
            return stacked.squeeze(2).permute(2, 0, 1).contiguous()
        return stacked.contiguous()

    def held(self, tokens: int) -> int:
        """Rows that the cache has once it has seen `tokens` tokens."""
        return min(tokens, self.window) if self.role == "window" else tokens


@dataclass(frozen=True)
class Scalar:
    """A number or flag of a cache layer. value: what it always is; None for one that counts the tokens seen."""

    layer: int
    path: Path
    value: int | bool | None

    def at(self, tokens: int) -> int | bool:
        """What it is after `tokens` tokens."""
        return tokens if self.value is None else self.value


@dataclass(frozen=True)
class Walk:
    """Everything that a model's caches hold.

    carried: tensors in pools. scalars: in the handoff record. empty: tensors without elements (layer, path, shape of
    [units, 0], dtype). fixed: attributes that the library sets with the first token (a dtype). devices: attributes
    that name the device, and tensors of settings that lie on it.
    """

    layers: int
    carried: tuple[Carried, ...]
    scalars: tuple[Scalar, ...]
    empty: tuple[Carried, ...]
    fixed: tuple[tuple[int, Path, Any], ...]
    devices: tuple[tuple[int, Path], ...]

    @property
    def facts(self) -> str:
        """All of it as text, for a fingerprint: two builds whose caches differ never pair."""
        carried = [(c.name, c.kind, c.part, str(c.dtype), c.shape, c.window) for c in self.carried + self.empty]
        return repr((carried, [(name_of(s.layer, s.path), s.value) for s in self.scalars]))


def name_of(layer: int, path: Path) -> str:
    """A layer and an attribute in words."""
    return f"cache layer {layer}, {path[0]}" + (f"[{path[1]}]" if path[1] is not None else "")


def leaves(layer: Any) -> Leaves:
    """All attributes of a cache layer, dicts by their entries."""
    found: Leaves = {}
    for attribute, value in vars(layer).items():
        if isinstance(value, dict) and all(isinstance(key, int) for key in value):
            found |= {(attribute, key): item for key, item in value.items()}
        else:
            found[attribute, None] = value
    return found


def put(layer: Any, path: Path, value: Any) -> None:
    """Set an attribute, or an entry of one."""
    attribute, key = path
    if key is None:
        setattr(layer, attribute, value)
    else:
        getattr(layer, attribute)[key] = value


def refuse(layer: int, path: Path, expected: str, actual: object) -> NoReturn:
    """A model that cannot be carried."""
    raise ManifestError(
        "this model keeps state that cannot be carried", where=name_of(layer, path), expected=expected, actual=actual,
        hint="Known are keys, values, indexer_keys, indexer_position_ids, conv_states, recurrent_states, and counters.",
    )  # fmt: skip


def walk(run: Callable[[Any, int, int], None], cache: Any, latent: int = 0) -> Walk:
    """Probe a model.

    run(cache, start, n): the model's forward over n tokens from position start. cache: an empty one. latent: width of
    the compressed latent that the configuration names, 0 where it names none. Raises `ManifestError` for state that
    cannot be carried.
    """
    outside = {k: v for k, v in vars(cache).items() if k != "layers"}
    before = [leaves(layer) for layer in cache.layers]
    run(cache, 0, PROBE[0])
    first = [leaves(layer) for layer in cache.layers]
    run(cache, *PROBE)
    second = [leaves(layer) for layer in cache.layers]
    if len(first) != len(before) or len(second) != len(before):
        refuse(len(before), ("layers", None), f"{len(before)} layers", len(second))
    for attribute, value in vars(cache).items():
        if attribute != "layers" and outside.get(attribute, outside) is not value:
            refuse(0, (attribute, None), "no state outside the layers", type(value).__name__)
    return _Sorter(latent, before, first, second).sort()


class _Sorter:
    """Sorts the attributes of all layers by what they are."""

    def __init__(self, latent: int, before: list[Leaves], first: list[Leaves], second: list[Leaves]) -> None:
        self._latent = latent
        self._before, self._first, self._second = before, first, second
        self._positions = any(isinstance(found.get(("indexer_position_ids", None)), torch.Tensor) for found in second)
        self._units: dict[tuple[str, int, str], int] = {}
        self.carried: list[Carried] = []
        self.empty: list[Carried] = []
        self.scalars: list[Scalar] = []
        self.fixed: list[tuple[int, Path, Any]] = []
        self.devices: list[tuple[int, Path]] = []

    def sort(self) -> Walk:
        for number, found in enumerate(self._second):
            for path, value in found.items():
                self._leaf(number, path, value)
        self._require_one_history()
        return Walk(
            len(self._second), tuple(self.carried), tuple(self.scalars), tuple(self.empty), tuple(self.fixed),
            tuple(self.devices),
        )  # fmt: skip

    def _leaf(self, layer: int, path: Path, value: Any) -> None:
        before, first = self._before[layer].get(path), self._first[layer].get(path)
        if isinstance(value, torch.Tensor):
            if isinstance(before, torch.Tensor):
                self._setting(layer, path, before, value)
            else:
                self._tensor(layer, path, first, value)
        elif isinstance(value, torch.device):
            self.devices.append((layer, path))
        elif isinstance(value, bool | int):
            self._number(layer, path, (before, first, value))
        elif value is None or isinstance(value, str | float | torch.dtype):
            if value != first:
                refuse(layer, path, "an attribute that stays", f"{first} after {PROBE[0]} tokens, then {value}")
            if value != before:
                self.fixed.append((layer, path, value))
        elif not (isinstance(value, list | tuple | dict | set) and not value):
            refuse(layer, path, "a tensor, a number or a flag", type(value).__name__)

    def _setting(self, layer: int, path: Path, before: torch.Tensor, value: torch.Tensor) -> None:
        """A tensor that exists before the first token is a setting, if it stays the same."""
        same = before.shape == value.shape and (value.is_meta or torch.equal(before.to(value.device), value))
        if not same:
            refuse(layer, path, "a setting that stays", f"changed, shape {tuple(value.shape)}")
        self.devices.append((layer, path))

    def _number(self, layer: int, path: Path, seen: tuple[Any, Any, int | bool]) -> None:
        before, first, second = seen
        if type(first) is type(second) and first == second:
            if before != second or type(before) is not type(second):
                self.scalars.append(Scalar(layer, path, second))
        elif not isinstance(second, bool) and (first, second) == (PROBE[0], sum(PROBE)):
            self.scalars.append(Scalar(layer, path, None))
        else:
            refuse(layer, path, "a number that stays, or counts tokens", f"{first} after {PROBE[0]}, then {second}")

    def _tensor(self, layer: int, path: Path, first: Any, value: torch.Tensor) -> None:
        if path[0] not in AXES and path[0] not in STATES:
            refuse(layer, path, "a tensor of a known kind", f"{value.dtype}, shape {tuple(value.shape)}")
        if not isinstance(first, torch.Tensor) or first.dtype != value.dtype:
            refuse(layer, path, f"a tensor from the first token on, of {value.dtype}", getattr(first, "dtype", first))
        role, window = self._role(layer, path)
        shape = _row_shape(layer, path, first, value, window if role == "window" else 0)
        kind, part = self._kind(layer, path, value)
        item = Carried(layer, path, kind, part, role, value.dtype, shape, window=window, shared=part == "ngram")
        if 0 in shape:
            self.empty.append(item)
            return
        at = (kind, layer, part)
        first_unit = self._units.get(at, 0)
        if first_unit:
            self._require_equal_units(item)
        self._units[at] = first_unit + shape[0]
        self.carried.append(Carried(**{**vars(item), "first": first_unit}))

    def _require_equal_units(self, item: Carried) -> None:
        other = next(c for c in self.carried if (c.kind, c.layer, c.part) == (item.kind, item.layer, item.part))
        if (other.dtype, other.shape[1:]) != (item.dtype, item.shape[1:]):
            refuse(
                item.layer, item.path, f"rows like those of {other.name}: {other.dtype} {other.shape[1:]}",
                f"{item.dtype} {item.shape[1:]}",
            )  # fmt: skip

    def _role(self, layer: int, path: Path) -> tuple[Role, int]:
        if path[0] in STATES:
            return "slot", 0
        window = self._second[layer].get(("sliding_window", None))
        if window is None or path[0] not in ("keys", "values"):
            return "tokens", 0
        if not isinstance(window, int) or window < 2:
            refuse(layer, ("sliding_window", None), "a window of at least 2 tokens", window)
        return "window", window - 1

    def _kind(self, layer: int, path: Path, value: torch.Tensor) -> tuple[str, str]:
        here = self._second[layer]
        attribute, key = path
        if attribute == "indexer_keys":
            return ("QSA_RAW_K", "key") if self._positions else ("INDEX_K", "key")
        if attribute == "indexer_position_ids":
            return "QSA_POSITIONS", "position"
        if attribute == "recurrent_states":
            return "MAMBA", "temporal"
        if attribute == "conv_states":
            if not value.dtype.is_floating_point:
                return "PLE", "ngram"
            beside = (v for (name, _), v in here.items() if name == "conv_states" and isinstance(v, torch.Tensor))
            ple = key != 0 and any(not v.dtype.is_floating_point for v in beside)
            return ("PLE" if ple else "MAMBA"), "conv"
        if here.get(("sliding_window", None)) is not None:
            return "SWA", attribute[0]
        keys, values = here["keys", None], here["values", None]
        widths = (keys.shape[-1], values.shape[-1])
        if keys.shape[1] == 1 and (widths[0] != widths[1] or widths[0] == self._latent):
            return "MLA", "latent" if attribute == "keys" else "rope"
        return "KV", attribute[0]

    def _require_one_history(self) -> None:
        """Shared tensors are kept once, so that all layers must agree on their form."""
        shared = [c for c in self.carried if c.shared]
        for item in shared[1:]:
            if (item.shape, item.dtype) != (shared[0].shape, shared[0].dtype):
                refuse(item.layer, item.path, f"{shared[0].dtype} {shared[0].shape}, as in layer {shared[0].layer}",
                       f"{item.dtype} {item.shape}")  # fmt: skip


def _row_shape(layer: int, path: Path, first: torch.Tensor, second: torch.Tensor, window: int) -> tuple[int, ...]:
    """[units, ...] of one row; refuses a tensor that does not grow, or stay, as its name says."""
    if path[0] in STATES:
        if first.shape != second.shape or second.shape[0] != 1 or second.dim() < 2:
            refuse(layer, path, "one state of a fixed size", f"{tuple(first.shape)}, then {tuple(second.shape)}")
        return tuple(second.shape[1:])
    request, token = AXES[path[0]]
    ranks = {"keys": 4, "values": 4}.get(path[0], 3)
    for tensor, seen in ((first, PROBE[0]), (second, sum(PROBE))):
        want = min(seen, window) if window else seen
        if tensor.dim() != ranks or tensor.shape[request] != 1 or tensor.shape[token] != want:
            refuse(layer, path, f"{want} rows after {seen} tokens", f"shape {tuple(tensor.shape)}")
    rest = tuple(n for axis, n in enumerate(second.shape) if axis not in (request, token))
    return rest if ranks == 4 else (1, *rest)


def numbers(cache: Any, walk_: Walk) -> list[int | bool]:
    """The scalars of a cache, in the walk's order. Raises `ManifestError` for one that the probe did not see."""
    found = [leaves(layer) for layer in cache.layers]
    result: list[int | bool] = []
    for scalar in walk_.scalars:
        value = found[scalar.layer].get(scalar.path)
        if not isinstance(value, int):
            refuse(scalar.layer, scalar.path, "a number or a flag", value)
        result.append(value)
    return result


def tensors(cache: Any, items: tuple[Carried, ...]) -> Mapping[tuple[int, Path], torch.Tensor]:
    """The carried tensors of a cache."""
    found = [leaves(layer) for layer in cache.layers]
    return {(item.layer, item.path): found[item.layer][item.path] for item in items}
