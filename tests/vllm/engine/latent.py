"""Small DeepSeek-like models written without ``transformers``, and their answers in plain torch.

The layers are latent (MLA). Those of DeepSeek-V3.2 and GLM-5 attend only the keys that an indexer
lists for each token. All MLPs are dense, and each model has a layer that predicts one token ahead
(MTP), which an engine may use for drafts.

The oracle attends the lists that an engine's indexer wrote. So an answer is judged for the keys it
was given, and the lists are judged by themselves: two indexers of different precision may list
different keys where scores nearly tie.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear, rms_norm, silu

VOCAB = 256
DENSE, SPARSE, SPARSE_LONG, SHARED = "deepseek_v3", "deepseek_v32", "deepseek_v32_long", "glm5"
"""Names of the models: dense latent layers, sparse ones with lists of 512 and of 2048 keys, and
sparse ones of which some attend the list of an earlier layer."""

_BASE: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    # No layer has experts, the drafting layer included.
    "first_k_dense_replace": 8,
    "n_routed_experts": 0,
    "n_shared_experts": 0,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 256,
    "n_group": 1,
    "topk_group": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 16384,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
    "dtype": "bfloat16",
}
_SPARSE = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_topk": 512,
    "index_n_heads": 64,
    "index_head_dim": 128,
}
_SHARED = {
    **_SPARSE,
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 5,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "index_n_heads": 32,
    # Layers 2 and 4 attend the lists of layers 1 and 3.
    "index_topk_freq": 2,
    "indexer_rope_interleave": True,
}
CONFIGS: dict[str, dict[str, Any]] = {
    DENSE: _BASE,
    SPARSE: {**_BASE, **_SPARSE},
    SPARSE_LONG: {**_BASE, **_SPARSE, "index_topk": 2048},
    SHARED: {**_BASE, **_SHARED},
}
"""A model's ``config.json``."""

_SCORING = ("q_b_proj", "kv_b_proj", "kv_a_proj_with_mqa")
"""Projections whose outputs are queries or keys, or parts of them."""
_GAINS = {**dict.fromkeys(_SCORING, 2**0.5), "o_proj": 2.0, "lm_head": 3.0, "head": 3.0}
"""Growth of a projection. Scores then have a standard deviation of 2, so that of 500 attended keys
about ten carry most of the weight; log-probabilities differ by several units."""


def lists_own_keys(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer of a sparse model has an indexer; the others attend an earlier layer's list.

    False for a model whose layers are dense.
    """
    if "index_topk" not in config:
        return False
    offset, every = config.get("index_skip_topk_offset", 2), config.get("index_topk_freq", 1)
    return max(layer - offset + 1, 0) % every == 0 or layer >= config["num_hidden_layers"]


def shapes_of(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all weights, as a checkpoint of the model family has them."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, rope = config["num_attention_heads"], config["qk_rope_head_dim"]
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    q_rank, kv_rank, vocab = config["q_lora_rank"], config["kv_lora_rank"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    layers = config["num_hidden_layers"]
    for layer in range(layers + config["num_nextn_predict_layers"]):
        prefix = f"model.layers.{layer}"
        if layer >= layers:
            yield f"{prefix}.embed_tokens.weight", (vocab, hidden)
            yield f"{prefix}.enorm.weight", (hidden,)
            yield f"{prefix}.hnorm.weight", (hidden,)
            yield f"{prefix}.eh_proj.weight", (hidden, 2 * hidden)
            yield f"{prefix}.shared_head.norm.weight", (hidden,)
            yield f"{prefix}.shared_head.head.weight", (vocab, hidden)
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
        prefix += ".self_attn"
        yield f"{prefix}.q_a_proj.weight", (q_rank, hidden)
        yield f"{prefix}.q_a_layernorm.weight", (q_rank,)
        yield f"{prefix}.q_b_proj.weight", (heads * (nope + rope), q_rank)
        yield f"{prefix}.kv_a_proj_with_mqa.weight", (kv_rank + rope, hidden)
        yield f"{prefix}.kv_a_layernorm.weight", (kv_rank,)
        yield f"{prefix}.kv_b_proj.weight", (heads * (nope + value), kv_rank)
        yield f"{prefix}.o_proj.weight", (hidden, heads * value)
        if lists_own_keys(config, layer):
            prefix += ".indexer"
            dim, index_heads = config["index_head_dim"], config["index_n_heads"]
            yield f"{prefix}.wq_b.weight", (index_heads * dim, q_rank)
            yield f"{prefix}.wk.weight", (dim, hidden)
            yield f"{prefix}.k_norm.weight", (dim,)
            yield f"{prefix}.k_norm.bias", (dim,)
            yield f"{prefix}.weights_proj.weight", (index_heads, hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def weights_of(config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random weights in bf16, by their names in a checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes_of(config):
        noise = torch.randn(shape, generator=generator)
        module = name.removesuffix(".weight").split(".")[-1]
        if name.endswith(".bias"):
            weight = 0.1 * noise
        elif "norm" in module:
            weight = 1.0 + 0.1 * noise
        elif module == "embed_tokens":
            weight = noise
        else:
            weight = noise * _GAINS.get(module, 1.0) / shape[1] ** 0.5
        found[name] = weight.to(torch.bfloat16)
    return found


def save_model(name: str, folder: Path, seed: int = 0) -> None:
    """Write ``config.json`` and ``model.safetensors`` of a model of ``CONFIGS``."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights_of(CONFIGS[name], seed), str(folder / "model.safetensors"))
    text = json.dumps(CONFIGS[name], indent=2)
    (folder / "config.json").write_text(text, encoding="utf-8")


# -- The answer in plain torch.


def rotated(x: Tensor, positions: Tensor, theta: float, interleaved: bool) -> Tensor:
    """Rotary embedding of all columns of ``x [T, ..., D]``, computed in float32.

    Args:
        x: vectors of T tokens.
        positions: ``[T]`` int64.
        theta: base of the frequencies.
        interleaved: a pair is two neighbouring columns; otherwise it is a column of the first half
            and the column of the second half below it.
    """
    dim = x.shape[-1]
    steps = torch.arange(0, dim, 2, dtype=torch.float64, device=x.device) / dim
    angles = (positions.double()[:, None] * theta**-steps).float()
    angles = angles.reshape(len(positions), *[1] * (x.ndim - 2), dim // 2)
    cos, sin = angles.cos(), angles.sin()
    wide = x.float()
    if interleaved:
        first, second = wide[..., ::2], wide[..., 1::2]
    else:
        first, second = wide.chunk(2, dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    joined = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return joined.to(x.dtype)


def _in_fp8(x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """``x`` rounded to e4m3 after division by ``scale``, which broadcasts."""
    limited = (x.float() / scale).clamp(-448.0, 448.0)
    return (limited.to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def stored_latent(latent: Tensor, rope: Tensor, cache: str) -> tuple[Tensor, Tensor]:
    """Latent ``[T, 512]`` and rotated ``[T, 64]`` parts of keys, as a cache's rows give them back.

    Args:
        latent: normalised latents.
        rope: parts that are rotated.
        cache: ``auto`` for rows in the model's type, ``fp8`` for e4m3 with a scale of one,
            ``fp8_ds_mla`` for e4m3 with a scale for each 128 columns and a rotated part in bf16.
    """
    if cache == "fp8":
        return _in_fp8(latent), _in_fp8(rope)
    if cache == "fp8_ds_mla":
        grouped = latent.float().unflatten(-1, (-1, 128))
        scale = (grouped.abs().amax(-1, keepdim=True) / 448.0).clamp(min=1e-12)
        return _in_fp8(grouped, scale).flatten(-2).to(latent.dtype), rope
    return latent, rope


@dataclass(frozen=True)
class Lists:
    """What is wrong with the lists that an indexer wrote for the tokens of some sequences."""

    rows: int
    """Tokens with more visible keys than a list holds, counted once per layer with an indexer."""
    missed_mean: float
    """Mean share of float32's keys that a list lacks."""
    missed_max: float
    rounding_mean: float
    """Mean share that float32's own scores would miss, with queries and keys in fp8."""
    rounding_max: float
    sequential: int
    """Well-formed lists of neighbouring keys only, which no score would choose."""
    malformed: int
    """Lists with a key twice, or an invisible key, or fewer keys than there is room for."""

    @classmethod
    def merged(cls, parts: Sequence[Lists]) -> Lists:
        """The judgement of several sequences or layers together."""
        rows = sum(part.rows for part in parts)

        def mean(name: str) -> float:
            return sum(getattr(part, name) * part.rows for part in parts) / max(rows, 1)

        return cls(
            rows=rows,
            missed_mean=mean("missed_mean"),
            missed_max=max((part.missed_max for part in parts), default=0.0),
            rounding_mean=mean("rounding_mean"),
            rounding_max=max((part.rounding_max for part in parts), default=0.0),
            sequential=sum(part.sequential for part in parts),
            malformed=sum(part.malformed for part in parts),
        )


class Listed(NamedTuple):
    """The lists of a layer with an indexer, each ``[T, index_topk]`` int32, and what is wrong."""

    attended: Tensor
    """Keys that the layer attends: the given ones, or else its own."""
    own: Tensor
    """The best keys by the scores of this run."""
    rounded: Tensor
    """The best keys by the scores of this run's queries and keys in fp8."""
    faults: Lists
    """What is wrong with the given lists."""


class Answer(NamedTuple):
    """What the oracle answers for a sequence of T tokens."""

    logits: Tensor
    """Logits ``[T, VOCAB]`` of the next tokens."""
    faults: Lists
    """What is wrong with the given lists."""
    lists: dict[int, Listed]
    """The lists of each layer with an indexer."""

    def faults_of(self, other: Answer) -> Lists:
        """What is wrong with the lists by ``other``'s fp8 scores, beside this run's own lists."""
        parts = []
        for layer, mine in self.lists.items():
            rows = torch.arange(len(mine.own), device=mine.own.device)
            parts.append(judged(other.lists[layer].rounded, mine.own, mine.rounded, rows))
        return Lists.merged(parts)


class Oracle:
    """A saved model in plain torch.

    Args:
        folder: folder of ``config.json`` and ``model.safetensors``.
        dtype: type of weights and activations; sums of attention are float32 at least.
        cache: rows that keys are rounded to, see :func:`stored_latent`.
        device: device that computes.
        scores_in_fp8: without given lists, choose keys by queries and keys in fp8, as engines do.
    """

    CHUNK = 256
    """Queries that attend at once."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype = torch.float32,
        cache: str = "auto",
        device: torch.device | str = "cpu",
        scores_in_fp8: bool = False,
    ) -> None:
        from safetensors.torch import load_file

        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.weights = {
            name: weight.to(device, dtype)
            for name, weight in load_file(str(folder / "model.safetensors")).items()
        }
        self.cache, self.device, self.dtype = cache, device, dtype
        self.scores_in_fp8 = scores_in_fp8
        self.theta = self.config["rope_parameters"]["rope_theta"]

    @torch.no_grad()
    def answer(self, tokens: Sequence[int], lists: Mapping[int, Tensor] | None = None) -> Answer:
        """Logits of the next tokens, and the lists of keys.

        Args:
            tokens: T token ids.
            lists: for each layer with an indexer, keys ``[T, index_topk]`` int32 of each token,
                padded with -1. Without them a sparse layer attends its own best keys.
        """
        found: dict[int, Listed] = {}
        ids = torch.tensor(tokens, device=self.device)
        positions = torch.arange(len(ids), device=self.device)
        hidden = self.weights["model.embed_tokens.weight"][ids]
        listed = None
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}"
            x = self._norm(hidden, f"{prefix}.input_layernorm")
            query_latent = self._norm(
                self._linear(x, f"{prefix}.self_attn.q_a_proj"), f"{prefix}.self_attn.q_a_layernorm"
            )
            if lists_own_keys(self.config, layer):
                given = None if lists is None else lists[layer].to(self.device)
                found[layer] = self._listed(x, query_latent, positions, layer, given)
                listed = found[layer].attended
            hidden = hidden + self._attend(x, query_latent, positions, layer, listed)
            x = self._norm(hidden, f"{prefix}.post_attention_layernorm")
            gate = silu(self._linear(x, f"{prefix}.mlp.gate_proj"))
            up = self._linear(x, f"{prefix}.mlp.up_proj")
            hidden = hidden + self._linear(gate * up, f"{prefix}.mlp.down_proj")
        logits = self._linear(self._norm(hidden, "model.norm"), "lm_head")
        return Answer(logits, Lists.merged([part.faults for part in found.values()]), found)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.weights[f"{name}.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        wide = rms_norm(x.float(), x.shape[-1:], weight.float(), self.config["rms_norm_eps"])
        return wide.to(x.dtype)

    def _attend(
        self, x: Tensor, query_latent: Tensor, positions: Tensor, layer: int, listed: Tensor | None
    ) -> Tensor:
        """Attention's output ``[T, hidden]``, over all earlier keys or over the listed ones."""
        config, prefix = self.config, f"model.layers.{layer}.self_attn"
        heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]
        value, rope = config["v_head_dim"], config["qk_rope_head_dim"]
        query = self._linear(query_latent, f"{prefix}.q_b_proj").unflatten(-1, (heads, -1))
        turned = rotated(query[..., nope:], positions, self.theta, interleaved=True)
        query = torch.cat([query[..., :nope], turned], -1)
        row = self._linear(x, f"{prefix}.kv_a_proj_with_mqa")
        latent = self._norm(row[:, :-rope], f"{prefix}.kv_a_layernorm")
        turned = rotated(row[:, -rope:], positions, self.theta, interleaved=True)
        latent, turned = stored_latent(latent, turned, self.cache)
        expanded = self._linear(latent, f"{prefix}.kv_b_proj").unflatten(-1, (heads, -1))
        keys = torch.cat([expanded[..., :nope], turned[:, None].expand(-1, heads, -1)], -1)
        values, scale = expanded[..., nope:], (nope + rope) ** -0.5
        parts = []
        for rows in positions.split(self.CHUNK):
            scores = torch.einsum("qhd,khd->hqk", query[rows], keys).float() * scale
            visible = positions[None] <= rows[:, None]
            if listed is not None:
                visible = visible & _as_mask(listed[rows], len(positions))
            shares = scores.masked_fill(~visible, -torch.inf).softmax(-1).to(x.dtype)
            parts.append(torch.einsum("hqk,khd->qhd", shares, values))
        out = torch.cat(parts).reshape(-1, heads * value)
        return self._linear(out, f"{prefix}.o_proj")

    def _listed(
        self, x: Tensor, query_latent: Tensor, positions: Tensor, layer: int, given: Tensor | None
    ) -> Listed:
        """The keys of each token; the given ones are attended where there are any."""
        config, prefix = self.config, f"model.layers.{layer}.self_attn.indexer"
        heads, rope = config["index_n_heads"], config["qk_rope_head_dim"]
        interleaved = bool(config.get("indexer_rope_interleave", False))

        def turned(vectors: Tensor) -> Tensor:
            first = rotated(vectors[..., :rope], positions, self.theta, interleaved)
            return torch.cat([first, vectors[..., rope:]], -1)

        query = turned(self._linear(query_latent, f"{prefix}.wq_b").unflatten(-1, (heads, -1)))
        norm = [self.weights[f"{prefix}.k_norm.{part}"].float() for part in ("weight", "bias")]
        key = self._linear(x, f"{prefix}.wk")
        key = turned(layer_norm(key.float(), key.shape[-1:], *norm, 1e-6).to(x.dtype))
        shares = self._linear(x, f"{prefix}.weights_proj").float()
        exact = query.float(), key.float()
        rounded = tuple(_in_fp8(part, _power_of_two_scale(part)) for part in exact)
        parts: list[tuple[Tensor, Tensor]] = []
        faults = []
        for rows in positions.split(self.CHUNK):
            parts.append((self._best(*exact, shares, rows), self._best(*rounded, shares, rows)))
            if given is not None:
                faults.append(judged(given[rows], *parts[-1], rows))
        own, in_fp8 = (torch.cat(lists) for lists in zip(*parts, strict=True))
        if given is None:
            given = in_fp8 if self.scores_in_fp8 else own
        return Listed(given, own, in_fp8, Lists.merged(faults))

    def _best(self, query: Tensor, key: Tensor, shares: Tensor, rows: Tensor) -> Tensor:
        """The ``index_topk`` visible keys of the highest scores, int32 padded with -1."""
        scores = torch.zeros(len(rows), len(key), device=key.device)
        # A group of heads at a time: all heads' products of a long sequence would fill gigabytes.
        for head in torch.arange(query.shape[1], device=key.device).split(8):
            products = torch.einsum("qhd,kd->hqk", query[rows][:, head], key).relu()
            scores += torch.einsum("hqk,qh->qk", products, shares[rows][:, head])
        width = self.config["index_topk"]
        visible = torch.arange(len(key), device=key.device)[None] <= rows[:, None]
        scores = scores.masked_fill(~visible, -torch.inf)
        top = scores.topk(min(width, len(key)), -1)
        found = torch.where(top.values == -torch.inf, -1, top.indices).int()
        return torch.nn.functional.pad(found, (0, width - found.shape[1]), value=-1)


def _as_mask(listed: Tensor, keys: int) -> Tensor:
    """Boolean ``[rows, keys]`` of the keys that are listed."""
    mask = torch.zeros(len(listed), keys + 1, dtype=torch.bool, device=listed.device)
    inside = (listed >= 0) & (listed < keys)
    mask.scatter_(1, torch.where(inside, listed, keys).long(), True)
    return mask[:, :keys]


def _power_of_two_scale(x: Tensor) -> Tensor:
    """vLLM's scale of a vector in fp8: the power of two that its largest entry needs."""
    largest = x.abs().amax(-1, keepdim=True).clamp(min=1e-10)
    return torch.exp2(torch.ceil(torch.log2(largest / 448.0)))


def judged(given: Tensor, own: Tensor, rounded: Tensor, rows: Tensor) -> Lists:
    """What is wrong with some tokens' lists, all ``[rows, index_topk]``.

    Args:
        given: the lists that are judged.
        own: float32's lists.
        rounded: lists by float32's scores of rounded queries and keys.
        rows: the tokens' positions.
    """
    width, visible = given.shape[1], rows + 1
    ordered = given.sort(-1).values
    filled = (given >= 0).sum(-1)
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(-1)
    wrong = twice | (ordered[:, -1] > rows) | (filled != visible.clamp(max=width))
    wrong = wrong | (given < -1).any(-1)
    is_cut = visible > width
    length = int(max(given.max(), own.max(), rounded.max(), rows.max())) + 1
    target = _as_mask(own, length)

    def missed(lists: Tensor) -> Tensor:
        return 1.0 - (_as_mask(lists, length) & target).sum(-1)[is_cut] / width

    lacks, floor = missed(given), missed(rounded)
    neighbours = is_cut & ~wrong & (ordered[:, -1] - ordered[:, 0] == width - 1)
    count = int(is_cut.sum())
    return Lists(
        rows=count,
        missed_mean=float(lacks.mean()) if count else 0.0,
        missed_max=float(lacks.max()) if count else 0.0,
        rounding_mean=float(floor.mean()) if count else 0.0,
        rounding_max=float(floor.max()) if count else 0.0,
        sequential=int(neighbours.sum()),
        malformed=int(wrong.sum()),
    )
