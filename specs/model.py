"""Model geometry: the facts about a model that attention needs, layer by layer.

``specs.hf_config.load_model_geometry`` makes a geometry from a bundled name or a ``config.json``.
"""

from __future__ import annotations

from enum import StrEnum, unique
from typing import Annotated, Final, Self, TypeVar

from pydantic import Field, ValidationInfo, field_validator

from specs.attention import AttentionSelectorConfig, AttentionType, MlaKernel
from specs.base import NonNegativeInt, PositiveFloat, PositiveInt, Spec, SpecError, spec_errors
from specs.dtypes import CacheDType, DType, DTypeField
from specs.engine import EngineConfig
from specs.kv_cache import (
    AnyKVCacheSpec,
    ChunkedLocalAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

V = TypeVar("V")


@unique
class LayerKind(StrEnum):
    """Which tokens a layer attends, and in what form it caches them."""

    FULL = "full_attention"
    """All tokens up to the token itself."""
    SLIDING_WINDOW = "sliding_window"
    """The last ``sliding_window`` tokens, the token itself included."""
    CHUNKED_LOCAL = "chunked_local_attention"
    """The tokens of the token's own aligned chunk, up to the token itself."""
    MLA = "mla"
    """All tokens up to the token itself, each cached as one latent row shared by all heads."""
    SPARSE_MLA = "sparse_mla"
    """The ``index_topk`` tokens that an indexer picks, cached as latent rows."""
    ENCODER_ONLY = "encoder_only"
    """All tokens on both sides (of a window, when there is one); nothing is cached."""

    @property
    def is_mla(self) -> bool:
        """True for latent attention, sparse or not."""
        return self in _MLA_KINDS


_MLA_KINDS: Final = (LayerKind.MLA, LayerKind.SPARSE_MLA)


class MLAGeometry(Spec):
    """Sizes of multi-head latent attention, in elements."""

    q_lora_rank: PositiveInt | None
    """Width of the compressed query; None when queries are projected directly."""
    kv_lora_rank: PositiveInt
    """Latent width L of a cached row."""
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: NonNegativeInt
    """Rotary width r, stored in the row behind the latent."""
    v_head_dim: PositiveInt

    @property
    def qk_head_dim(self) -> int:
        """Query and key head size before absorption (192 in DeepSeek-V3); it sets the scale."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_size(self) -> int:
        """Absorbed query and cached key width, L + r (576 in DeepSeek-V3)."""
        return self.kv_lora_rank + self.qk_rope_head_dim


class IndexerGeometry(Spec):
    """Sizes of a sparse layer's indexer, the small attention that scores tokens for the top-k."""

    index_topk: PositiveInt
    """Tokens that each query attends."""
    index_n_heads: PositiveInt
    index_head_dim: PositiveInt
    """Elements of a cached indexer key."""


def _of_kinds(
    value: V, info: ValidationInfo, needed: tuple[LayerKind, ...], allowed: tuple[LayerKind, ...]
) -> V:
    """``value`` of a field that ``needed`` kinds must have and only ``allowed`` kinds may have."""
    kind = info.data.get("kind")
    if kind in needed and value is None:
        raise ValueError(f"a layer of kind {kind.value!r} needs it")
    if kind is not None and kind not in allowed and value is not None:
        names = ", ".join(repr(other.value) for other in allowed)
        raise ValueError(f"only for kind {names}; this layer's is {kind.value!r}")
    return value


class LayerGeometry(Spec):
    """One attention layer; equal layers share one KV cache group and one metadata build."""

    kind: LayerKind
    num_heads: PositiveInt
    """Query heads H: of the whole model, or of one rank after :meth:`local`."""
    num_kv_heads: PositiveInt
    """KV heads Hk; 1 for MLA, whatever the model's config says: heads share the latent row."""
    head_size: PositiveInt
    """Query and key head size D; for MLA before absorption, ``qk_nope + qk_rope`` (192)."""
    head_size_v: PositiveInt | None = None
    """Value head size Dv, ``v_head_dim`` for MLA; None means ``head_size``."""
    scale: PositiveFloat
    """Multiplies q.k before the softmax; the same number before and after MLA absorption."""
    sliding_window: PositiveInt | None = None
    """Visible keys, the token's own included; in an encoder layer, to each side."""
    attention_chunk_size: PositiveInt | None = None
    """Tokens of a chunk; chunks are aligned to position 0."""
    logits_soft_cap: PositiveFloat | None = None
    """c in ``c * tanh(s / c)``; None means no cap."""
    has_sinks: bool = False
    """One learned logit per head in the softmax denominator."""
    use_alibi: bool = False
    """Linear bias per head (ALiBi) instead of rotary positions: slope * (key - query), in an
    encoder layer -slope * |key - query|."""
    mla: MLAGeometry | None = None
    indexer: IndexerGeometry | None = None
    """The layer's own indexer; None for a sparse layer that takes another layer's list."""
    shared_index_topk: PositiveInt | None = None
    """Length of the top-k list of a sparse layer without an indexer, which attends the list that
    the nearest earlier layer with an indexer made. None for every other layer."""
    shares_kv: bool = False
    """The layer stores nothing and attends the cache of an earlier layer: the nearest one that
    stores and is otherwise equal."""

    @field_validator("num_kv_heads")
    @classmethod
    def _kv_heads_divide_the_heads(cls, num_kv_heads: int, info: ValidationInfo) -> int:
        """Every KV head serves the same number of query heads."""
        num_heads = info.data.get("num_heads", num_kv_heads)
        if num_heads % num_kv_heads:
            raise ValueError(f"must divide num_heads ({num_heads})")
        return num_kv_heads

    @field_validator("num_kv_heads")
    @classmethod
    def _latent_layers_have_one_kv_head(cls, num_kv_heads: int, info: ValidationInfo) -> int:
        """All heads of an MLA layer share the latent row."""
        kind = info.data.get("kind")
        if kind in _MLA_KINDS and num_kv_heads != 1:
            raise ValueError(f"must be 1 for kind {kind.value!r}")
        return num_kv_heads

    @field_validator("sliding_window")
    @classmethod
    def _window_fits_the_kind(cls, window: int | None, info: ValidationInfo) -> int | None:
        """A sliding-window layer has a window, an encoder layer may have one, no other has."""
        sliding = LayerKind.SLIDING_WINDOW
        return _of_kinds(window, info, (sliding,), (sliding, LayerKind.ENCODER_ONLY))

    @field_validator("attention_chunk_size")
    @classmethod
    def _chunk_fits_the_kind(cls, chunk: int | None, info: ValidationInfo) -> int | None:
        """A chunked layer has a chunk size, no other has."""
        return _of_kinds(chunk, info, (LayerKind.CHUNKED_LOCAL,), (LayerKind.CHUNKED_LOCAL,))

    @field_validator("mla")
    @classmethod
    def _mla_fits_the_kind(
        cls, mla: MLAGeometry | None, info: ValidationInfo
    ) -> MLAGeometry | None:
        """MLA layers have latent sizes, no other layer has."""
        return _of_kinds(mla, info, _MLA_KINDS, _MLA_KINDS)

    @field_validator("mla")
    @classmethod
    def _head_sizes_are_those_of_mla(
        cls, mla: MLAGeometry | None, info: ValidationInfo
    ) -> MLAGeometry | None:
        """``head_size`` and ``head_size_v`` agree with the latent sizes."""
        head_size = info.data.get("head_size")
        if mla is None or head_size is None:
            return mla
        sizes = (head_size, info.data.get("head_size_v") or head_size)
        expected = (mla.qk_head_dim, mla.v_head_dim)
        if sizes != expected:
            raise ValueError(
                f"means head_size {expected[0]} and head_size_v {expected[1]}; this layer's are "
                f"{sizes[0]} and {sizes[1]}"
            )
        return mla

    @field_validator("indexer")
    @classmethod
    def _indexer_fits_the_kind(
        cls, indexer: IndexerGeometry | None, info: ValidationInfo
    ) -> IndexerGeometry | None:
        """Only a sparse layer may have an indexer."""
        return _of_kinds(indexer, info, (), (LayerKind.SPARSE_MLA,))

    @field_validator("shared_index_topk")
    @classmethod
    def _sparse_layers_have_one_list(cls, topk: int | None, info: ValidationInfo) -> int | None:
        """A sparse layer makes its top-k list or takes another layer's; other layers have none."""
        has_own = info.data.get("indexer") is not None
        if has_own and topk is not None:
            raise ValueError("only for a layer without an indexer")
        needed = () if has_own or "indexer" not in info.data else (LayerKind.SPARSE_MLA,)
        return _of_kinds(topk, info, needed, (LayerKind.SPARSE_MLA,))

    @property
    def v_size(self) -> int:
        """Value head size."""
        return self.head_size if self.head_size_v is None else self.head_size_v

    @property
    def index_topk(self) -> int | None:
        """Tokens that each query of a sparse layer attends, from its or another layer's list."""
        return self.shared_index_topk if self.indexer is None else self.indexer.index_topk

    @property
    def label(self) -> str:
        """Kind, window and what the layer takes from another layer: "sliding_window 1024"."""
        window = "" if self.sliding_window is None else f" {self.sliding_window}"
        shared = " (shared list)" if self.shared_index_topk is not None else ""
        return f"{self.kind.value}{window}{shared}{' (shared cache)' if self.shares_kv else ''}"

    @property
    def num_queries_per_kv(self) -> int:
        """Query heads that share a KV head (GQA group)."""
        return self.num_heads // self.num_kv_heads

    def local(self, tensor_parallel_size: int) -> LayerGeometry:
        """The layer as one tensor-parallel rank sees it.

        Query heads are divided. KV heads are divided too while they last; with more ranks than KV
        heads each rank keeps one, replicated. The one latent row of MLA is on every rank.

        Raises:
            SpecError: heads that do not divide evenly over the ranks.
        """
        ranks, kv_heads = tensor_parallel_size, self.num_kv_heads
        if ranks < 1:
            raise SpecError(f"tensor_parallel_size must be at least 1, got {ranks}")
        if self.num_heads % ranks:
            raise SpecError(
                f"tensor_parallel_size must divide num_heads ({self.num_heads}), got {ranks}"
            )
        if kv_heads % ranks and ranks % kv_heads:
            raise SpecError(
                f"tensor_parallel_size must divide num_kv_heads ({kv_heads}) or be a multiple of "
                f"it, got {ranks}"
            )
        return self.replace(
            num_heads=self.num_heads // ranks, num_kv_heads=max(1, kv_heads // ranks)
        )

    def selector_config(
        self,
        dtype: DType | str,
        kv_cache_dtype: CacheDType | str = CacheDType.AUTO,
        block_size: int | None = None,
        engine: EngineConfig | None = None,
    ) -> AttentionSelectorConfig:
        """The requirements of this layer, for the selector of a backend.

        Args:
            dtype: model (activation) dtype.
            kv_cache_dtype: the engine's ``kv_cache_dtype``.
            block_size: tokens per block that the user asked for; None leaves it to the backend.
            engine: adds batch invariance and context parallelism; None means neither.

        Raises:
            SpecError: a value that no selector request can have.
        """
        is_encoder = self.kind is LayerKind.ENCODER_ONLY
        parallel = None if engine is None else engine.parallel
        with spec_errors(f"selector request of a {self.kind.value} layer"):
            return AttentionSelectorConfig(
                head_size=self.head_size if self.mla is None else self.mla.latent_size,
                dtype=DType.parse(dtype),
                kv_cache_dtype=CacheDType.parse(kv_cache_dtype),
                block_size=block_size,
                use_mla=self.kind.is_mla,
                has_sink=self.has_sinks,
                use_sparse=self.kind is LayerKind.SPARSE_MLA,
                attn_type=AttentionType.ENCODER_ONLY if is_encoder else AttentionType.DECODER,
                has_sliding_window=self.sliding_window is not None,
                use_batch_invariant=engine is not None and engine.batch_invariant,
                use_dcp=parallel is not None and parallel.decode_context_parallel_size > 1,
                use_pcp=parallel is not None and parallel.prefill_context_parallel_size > 1,
                use_rswa=engine is not None and engine.rswa_window is not None,
                use_logits_soft_cap=self.logits_soft_cap is not None,
                use_alibi=self.use_alibi and not is_encoder,
                use_alibi_symmetric=self.use_alibi and is_encoder,
                use_chunked_local=self.kind is LayerKind.CHUNKED_LOCAL,
                mla_kernel=(
                    engine.kernels.latent.rows
                    if engine is not None and self.kind.is_mla
                    else MlaKernel.AUTO
                ),
                head_size_v=None if self.kind.is_mla else self.head_size_v,
            )

    def kv_cache_spec(
        self,
        block_size: int,
        dtype: DType | str,
        kv_cache_dtype: CacheDType | str = CacheDType.AUTO,
        tensor_parallel_size: int = 1,
    ) -> AnyKVCacheSpec:
        """The spec of one rank's cache for this layer; it does not cover the indexer's cache.

        A layer that shares another layer's cache stores nothing; its spec is that of the cache
        which it reads.

        Args:
            block_size: tokens per block.
            dtype: model dtype, which ``kv_cache_dtype`` ``auto`` stores.
            kv_cache_dtype: the engine's ``kv_cache_dtype``.
            tensor_parallel_size: ranks over which heads are divided (see :meth:`local`).

        Raises:
            SpecError: heads that do not divide over the ranks, or a value that no spec can have.
        """
        common = {
            "block_size": block_size,
            "dtype": DType.parse(dtype),
            "cache_dtype": CacheDType.parse(kv_cache_dtype),
        }
        local = self.local(tensor_parallel_size)
        dense = {
            **common,
            "num_kv_heads": local.num_kv_heads,
            "head_size": self.head_size,
            "head_size_v": self.head_size_v,
        }
        with spec_errors(f"KV cache of a {self.kind.value} layer"):
            if self.mla is not None:
                return MLAAttentionSpec.model_validate(
                    {
                        **common,
                        "kv_lora_rank": self.mla.kv_lora_rank,
                        "qk_rope_head_dim": self.mla.qk_rope_head_dim,
                        "topk": self.index_topk,
                    }
                )
            if self.kind is LayerKind.SLIDING_WINDOW:
                window = {"sliding_window": self.sliding_window}
                return SlidingWindowSpec.model_validate({**dense, **window})
            if self.kind is LayerKind.CHUNKED_LOCAL:
                chunk = {"attention_chunk_size": self.attention_chunk_size}
                return ChunkedLocalAttentionSpec.model_validate({**dense, **chunk})
            if self.kind is LayerKind.ENCODER_ONLY:
                window = {"sliding_window": self.sliding_window}
                return EncoderOnlyAttentionSpec.model_validate({**dense, **window})
            return FullAttentionSpec.model_validate(dense)


class OtherLayers(Spec):
    """Layers of one kind that are not attention."""

    name: Annotated[str, Field(min_length=1)]
    """Name of these layers in the model's config."""
    indices: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)]
    """Their numbers among all layers of the model."""


class ModelGeometry(Spec):
    """A model as attention sees it: its layers, their sizes and the dtype they compute in."""

    name: Annotated[str, Field(min_length=1)]
    architecture: Annotated[str, Field(min_length=1)]
    """The model class, as in Hugging Face's ``architectures``."""
    dtype: DTypeField = DType.BFLOAT16
    """Model (activation) dtype."""
    hidden_size: PositiveInt
    """Width of the residual stream, in elements."""
    max_position_embeddings: PositiveInt
    """Longest sequence that the model was made for, in tokens."""
    layers: Annotated[tuple[LayerGeometry, ...], Field(min_length=1)]
    """Attention layers, first to last."""
    other_layers: tuple[OtherLayers, ...] = ()
    """Layers that are not attention (state-space models, linear attention): nothing here runs them.
    """
    notes: tuple[str, ...] = ()
    """Notes for a user of this geometry: how it was read, and facts that its fields do not hold."""

    @field_validator("dtype")
    @classmethod
    def _dtype_is_one_of_a_model(cls, dtype: DType) -> DType:
        """Activations are floats of 16 bits or more."""
        if not dtype.is_floating or dtype.itemsize < 2:
            raise ValueError("a model computes in float16, bfloat16, float32 or float64")
        return dtype

    @field_validator("layers")
    @classmethod
    def _shared_lists_have_a_maker(
        cls, layers: tuple[LayerGeometry, ...]
    ) -> tuple[LayerGeometry, ...]:
        """A layer that takes a top-k list comes after a layer that makes one of that length."""
        made: int | None = None
        for index, layer in enumerate(layers):
            if layer.indexer is not None:
                made = layer.indexer.index_topk
            elif layer.shared_index_topk not in (None, made):
                before = "no layer before it makes one" if made is None else f"that list has {made}"
                raise ValueError(
                    f"layer {index} takes a list of {layer.shared_index_topk}, and {before}"
                )
        return layers

    @field_validator("layers")
    @classmethod
    def _shared_caches_have_a_writer(
        cls, layers: tuple[LayerGeometry, ...]
    ) -> tuple[LayerGeometry, ...]:
        """A layer that shares a cache comes after an otherwise equal layer that stores."""
        stored = set()
        for index, layer in enumerate(layers):
            writer = layer.replace(shares_kv=False)
            if not layer.shares_kv:
                stored.add(layer)
            elif writer not in stored:
                raise ValueError(
                    f"layer {index} shares a cache, and no equal layer before it stores one"
                )
        return layers

    @property
    def num_layers(self) -> int:
        """Attention layers of the model."""
        return len(self.layers)

    @property
    def kinds(self) -> tuple[LayerGeometry, ...]:
        """The distinct layers, in order of first appearance."""
        return tuple(dict.fromkeys(self.layers))

    @property
    def is_encoder(self) -> bool:
        """True when no layer caches anything (BERT and its kin)."""
        return all(layer.kind is LayerKind.ENCODER_ONLY for layer in self.layers)

    def groups(self) -> tuple[tuple[LayerGeometry, tuple[int, ...]], ...]:
        """Each distinct layer with the indices of the layers equal to it."""
        indices: dict[LayerGeometry, list[int]] = {}
        for index, layer in enumerate(self.layers):
            indices.setdefault(layer, []).append(index)
        return tuple((layer, tuple(equal)) for layer, equal in indices.items())

    def list_maker(self, index: int) -> int | None:
        """The layer that makes the list of layer ``index``; None unless another layer makes it."""
        if self.layers[index].shared_index_topk is None:
            return None
        return max(i for i in range(index) if self.layers[i].indexer is not None)

    def local(self, tensor_parallel_size: int) -> Self:
        """The model as one tensor-parallel rank sees it.

        Raises:
            SpecError: heads that do not divide evenly over the ranks.
        """
        return self.replace(
            layers=tuple(layer.local(tensor_parallel_size) for layer in self.layers)
        )

    def select_layers(self, count: int) -> Self:
        """A smaller model of ``count`` of these layers, in their order.

        The first layer of each distinct geometry is selected first, so that the smaller model has
        every kind when ``count`` allows; the earliest of the remaining layers follow. Layers that
        are not attention are left out.

        Raises:
            SpecError: ``count`` below 1 or above ``num_layers``.
        """
        if not 1 <= count <= self.num_layers:
            raise SpecError(
                f"count must be from 1 to {self.num_layers} (layers of {self.name}), got {count}"
            )
        first = [indices[0] for _, indices in self.groups()]
        others = [index for index in range(self.num_layers) if index not in first]
        kept = sorted((first + others)[:count])
        return self.replace(layers=tuple(self.layers[index] for index in kept), other_layers=())
