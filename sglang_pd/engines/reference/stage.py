"""One pipeline stage on one rank: its layers over its pools."""

from __future__ import annotations

import torch

from sglang_pd.engines.reference.attention import Choice, Place, attention_layer, causal
from sglang_pd.engines.reference.config import ReferenceConfig
from sglang_pd.engines.reference.gdn import GdnPools, gdn_layer
from sglang_pd.engines.reference.grid import act, linear, project, rms, snap
from sglang_pd.engines.reference.links import Links
from sglang_pd.engines.reference.mla import MlaPools, mla_layer
from sglang_pd.engines.reference.ple import next_history, ple_layer
from sglang_pd.engines.reference.qsa import QsaPools, choose_blocks, commit_coordinates, coordinates_before
from sglang_pd.engines.reference.step import Step, put, take
from sglang_pd.engines.reference.weights import Attention, Cut, Gdn, Layer, Mla, Mlp, Weights
from sglang_pd.memory.pools import RankPools
from sglang_pd.protocol.kinds import PLE_NGRAM_STATE_LAYER_ID, QSA_ROPE_STATE_LAYER_ID


class Stage:
    """Layers of one stage. Holds views of the pools, and no state of any request."""

    def __init__(self, config: ReferenceConfig, weights: Weights, cut: Cut, links: Links, pools: RankPools) -> None:
        self.config, self.weights, self.cut, self.links = config, weights, cut, links
        have = set(pools.keys)
        self._pool = {key: pools.slots(*key) for key in have}
        self._rope_ring = self._pool.get(("QSA_PENDING", QSA_ROPE_STATE_LAYER_ID, "rope"))
        self._history = self._pool.get(("PLE", PLE_NGRAM_STATE_LAYER_ID, "ngram"))
        numbers = list(weights.layers)
        self._last_qsa = max((n for n in numbers if config.layers[n] == "qsa"), default=-1)
        self._last_ple = max((n for n in numbers if n in config.ple_layers), default=-1)

    def run(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """All layers over the new tokens. x, result: float64 [B, n, hidden]."""
        if self._rope_ring is not None and step.qsa is not None:
            step.rope_ring = coordinates_before(self._rope_ring, step.qsa)
        if self._history is not None and step.slot is not None:
            step.history = take(self._history, step.slot)
        for number, layer in self.weights.layers.items():
            if layer.ple is not None:
                x = snap(x + ple_layer(x, layer.ple, step, self._pool["PLE", number, "conv"], self.config))
                if number == self._last_ple:
                    self._advance_history(step)
            x = snap(x + self._mix(number, layer, rms(x), step))
            if number == self._last_qsa and self._rope_ring is not None and step.qsa is not None:
                commit_coordinates(self._rope_ring, step, step.qsa)
            x = snap(x + self._mlp(layer.mlp, rms(x)))
        return x

    def _advance_history(self, step: Step) -> None:
        if self._history is not None and step.history is not None and step.slot is not None:
            put(self._history, step.slot, next_history(step.history, step.ids))

    def _mlp(self, w: Mlp, x: torch.Tensor) -> torch.Tensor:
        gate, up = project(x, w.into)
        hidden = snap(act(gate) * up)
        return snap(self.links.tp_sum(linear(hidden, w.down)))

    def _mix(self, number: int, layer: Layer, x: torch.Tensor, step: Step) -> torch.Tensor:
        w = layer.mixer
        if isinstance(w, Gdn):
            pools = GdnPools(self._pool["MAMBA", number, "conv"], self._pool["MAMBA", number, "temporal"])
            return gdn_layer(x, w, step, pools, self.config, self.links)
        if isinstance(w, Mla):
            mla = MlaPools(
                self._pool["MLA", number, "latent"],
                self._pool.get(("MLA", number, "rope")),
                self._pool["INDEX_K", number, "key"],
                self._pool["INDEX_K", number, "scale"],
            )
            return mla_layer(x, w, step, mla, (self.config, self.cut), self.links)
        return self._attention(number, layer.kind, w, x, step)

    def _attention(self, number: int, kind: str, w: Attention, x: torch.Tensor, step: Step) -> torch.Tensor:
        window = kind == "swa"
        name = "SWA" if window else "KV"
        keys, write = (step.window, step.window_write) if window else (step.keys, step.write)
        if keys is None or write is None:
            raise TypeError("attention needs token pools")
        parts = project(x, w.into)
        choice: Choice
        if kind == "qsa":
            pools = QsaPools(self._pool["QSA_PENDING", number, "key"], self._pool["QSA_COMPRESSED", number, "key"])
            choice = choose_blocks(parts[3], parts[4], step, pools, self.config)
        else:
            choice = causal(step, keys, self.config.window if window else 0)
        place = Place(self._pool[name, number, "k"], self._pool[name, number, "v"], write, keys)
        # Keys and values are whole on every context-parallel rank here: nothing is merged over that group.
        return attention_layer(parts[:3], w, step, place, choice, Links(tp_sum=self.links.tp_sum))
