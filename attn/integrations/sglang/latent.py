"""Latent layers (MLA) in SGLang: our triple over its pool of latent rows.

SGLang's models absorb queries and project outputs. Prompts come with keys and values of the new
tokens, expanded for every head, which are attended as they lie; what is cached of them is expanded
here, in chunks. Where a prompt has few new tokens behind many cached ones, it comes with absorbed
queries, one row for each token.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch

from attn.impls.base import LayerScales
from attn.integrations.sglang import checks
from attn.integrations.sglang.backend import SlotBackend, log_served, rows_of
from attn.integrations.sglang.dense import cache_name, pages_of, result_of
from attn.integrations.sglang.steps import Step
from attn.registry import AttentionBackendEnum
from builders.batch import CommonAttentionMetadata
from builders.latent.prefill import LatentPrefill
from specs.base import power_of_two
from specs.dtypes import CacheDType, DType
from specs.engine import EngineConfig, SpeculativeConfig
from specs.kv_cache import MLAAttentionSpec
from specs.layouts import KVViews

BACKEND: Final = "TRITON_MLA"
LATENT, EXPANDED = "latent", "expanded"
MOST_WARM_ROWS: Final = 1024
"""Most rows of absorbed prompts that a builder is made for before they come."""


class LatentBackend(SlotBackend):
    """Serves models of latent layers over the latent pool."""

    pools = checks.LATENT_POOLS

    def __init__(self, runner: Any, draft_step: int | None = None) -> None:
        """See :class:`SlotBackend`."""
        super().__init__(runner, draft_step)
        model = runner.model_config
        self._rank, self._rope = int(model.kv_lora_rank), int(model.qk_rope_head_dim)
        self._nope, self._value = int(model.qk_nope_head_dim), int(model.v_head_dim)
        self._impls: dict[Any, Any] = {}
        self._attenders: dict[Any, Any] = {}
        self._modules: dict[Any, Any] = {}
        """SGLang's module of each layer that attends expanded keys: it has the projections."""
        # A row's bits would depend on how its prompt is cut.
        self._may_expand = not self.facts.is_deterministic
        self._builders: dict[tuple[int, int, bool], Any] = {}
        self._heads = int(self.layers[0].tp_q_head_num)
        self._cache = cache_name(self.token_to_kv_pool.dtype, self.facts.dtype)
        self._scales = LayerScales.of(device=self.facts.device)
        self._most = (self.max_reqs, self.facts.max_tokens)

    def plan(self, step: Step) -> None:
        """See the base class; a prompt's plan is made by the first layer that asks for it."""
        if step.full.max_query_len <= self.facts.draft_tokens:
            self._record(step, LATENT)

    def _builder(self, reqs: int, tokens: int, *, by_row: bool) -> Any:
        """The builder for steps of this many requests and tokens; kept, and replaced if too small.

        Args:
            reqs: requests.
            tokens: new tokens of all.
            by_row: every request has one token, whatever the engine's verifies have.
        """
        for (most_reqs, most_tokens, kept_by_row), kept in self._builders.items():
            if kept_by_row is by_row and reqs <= most_reqs and tokens <= most_tokens:
                return kept
        most = (power_of_two(reqs), power_of_two(tokens))
        if not by_row:
            most = max(most[0], self.max_reqs), power_of_two(max(most[1], self._most[1]))
        facts, drafts = self.facts, 0 if by_row else self.facts.draft_tokens - 1
        config = EngineConfig(
            max_model_len=facts.max_len,
            max_num_seqs=most[0],
            max_num_batched_tokens=most[1],
            num_heads=self._heads,
            speculative=SpeculativeConfig(num_speculative_tokens=drafts) if drafts else None,
            batch_invariant=facts.is_deterministic,
            exact_host_lengths=False,
        )
        spec = MLAAttentionSpec(
            block_size=facts.page_size,
            dtype=DType.parse(facts.dtype),
            cache_dtype=CacheDType.parse(self._cache),
            kv_lora_rank=self._rank,
            qk_rope_head_dim=self._rope,
        )
        builder_cls = AttentionBackendEnum[BACKEND].get_class().get_builder_cls()
        # Builders are never dropped: graphs may hold their addresses.
        built = self._builders[(*most, by_row)] = builder_cls(
            spec, ["layers"], config, facts.device
        )
        words = (
            f"latent layers of {self._heads} query heads, rows of {self._rank} + {self._rope}, "
            f"{facts.dtype} over {self._cache} KV in pages of {facts.page_size}"
        )
        log_served(BACKEND, words, built)
        return built

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """See the base class."""
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self._most = (self.max_reqs, max(self._most[1], max_num_tokens))

    def _record(self, step: Step, kind: str) -> Any:
        """A step's record; the first layer that asks has it built."""
        record = step.records.get(kind)
        if record is None:
            plan = self._plan_expanded if kind == EXPANDED else self._plan_latent
            record = step.records[kind] = plan(step)
        return record

    def _plan_latent(self, step: Step) -> Any:
        """The record of absorbed queries; long ones become one request for each token."""
        batch = step.full
        by_row = batch.max_query_len > self.facts.draft_tokens
        if by_row:
            batch = one_token_each(batch)
        builder = self._builder(batch.num_reqs, batch.num_actual_tokens, by_row=by_row)
        return builder.build(0, batch)

    def _plan_expanded(self, step: Step) -> LatentPrefill:
        """The plan of new tokens among themselves, and of their cached tokens."""
        batch = step.full
        builder = self._builder(batch.num_reqs, batch.num_actual_tokens, by_row=False)
        lens = batch.query_start_loc_cpu.diff() + torch.tensor(step.cached, dtype=torch.int32)
        plan: LatentPrefill = builder.expanded.plan(batch.replace(seq_lens_cpu_upper_bound=lens), 0)
        return plan

    def expands(self, module: Any, forward_batch: Any) -> bool:
        """Whether a step of prompts with cached tokens shall come with expanded keys.

        Expanding a cached token costs as much as attending it by some number of absorbed queries.

        Args:
            module: SGLang's module of latent attention, which has the projections.
            forward_batch: SGLang's ``ForwardBatch``.
        """
        counts, cached = forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu
        is_plain = forward_batch.forward_mode.name == "EXTEND"
        if not self._may_expand or not is_plain or counts is None or cached is None:
            return False
        rank, expanded = self._rank, self._nope + self._value
        least = rank * expanded / max(2 * rank - expanded, 1)
        gain = sum(had * (new - least) for new, had in zip(counts, cached, strict=True))
        if gain <= 0 or not has_projections(module, self.facts.dtype):
            return False
        self._modules[module.attn_mha] = module
        return True

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Write a layer's new latent rows and attend in latent space, or attend expanded keys.

        Args:
            q: ``[T, H, L]`` beside ``q_rope``; or ``[T, H, L + r]``; or, of a prompt with expanded
                keys, ``[T, H, P + r]``. Rows may be flat.
            k: ``[T, 1, L]`` beside ``k_rope``; or ``[T, 1, L + r]``; or ``[T, H, P + r]``.
            v: ``[T, H, V]`` of a prompt with expanded keys.
            layer: SGLang's ``RadixAttention``.
            forward_batch: SGLang's ``ForwardBatch``.
            save_kv_cache: whether ``k`` is written.
            **kwargs: ``q_rope``, ``k_rope`` and ``return_lse``.

        Returns:
            ``[T, H * L]`` or ``[T, H * V]``; with a log-sum-exp also ``[T, H]`` fp32, a natural
            logarithm.

        Raises:
            NotImplementedError: an argument that no kernel reads, or expanded keys of cached
                tokens.
        """
        q_rope, k_rope = kwargs.pop("q_rope", None), kwargs.pop("k_rope", None)
        wanted = bool(getattr(forward_batch, "mha_return_lse", False))
        return_lse = kwargs.pop("return_lse", False) or wanted
        checks.refuse_arguments(kwargs)
        step = self.forward_metadata
        if step is None:
            heads, width = layer.tp_q_head_num, layer.v_head_dim
            empty = q.new_zeros(len(q), heads, width)
            return result_of(empty, None)
        if layer.tp_k_head_num == 1 and layer.v_head_dim == self._rank:
            if save_kv_cache and k is not None:
                self._write(k, k_rope, layer, forward_batch, step)
            query = rows_of(
                q, layer.tp_q_head_num, self._rank + (0 if q_rope is not None else self._rope)
            )
            return self._attend_latent(query, q_rope, layer, step, return_lse)
        if getattr(forward_batch, "attn_attend_prefix_cache", False):
            raise NotImplementedError(
                "attention backend 'attn' attends cached tokens in latent space: set "
                "--disable-chunked-prefix-cache"
            )
        return self._attend_expanded(q, k, v, layer, step, return_lse)

    def _pages(self, layer: Any) -> torch.Tensor:
        """``[N, P, L + r]`` view of a layer's pool."""
        rows = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        return pages_of(rows, self.facts.page_size).squeeze(2)

    def _impl(self, layer: Any) -> Any:
        impl = self._impls.get(layer)
        if impl is None:
            impl = self._impls[layer] = self._new_impl(layer)
        return impl

    def _new_impl(self, layer: Any) -> Any:
        impl_cls: Any = AttentionBackendEnum[BACKEND].get_class().get_impl_cls()
        return impl_cls(
            *(layer.tp_q_head_num, self._rank + self._rope, layer.scaling, 1),
            *(None, None, self._cache, None, "decoder", None),
            kv_lora_rank=self._rank,
            qk_nope_head_dim=self._nope,
            qk_rope_head_dim=self._rope,
            qk_head_dim=self._nope + self._rope,
            v_head_dim=self._value,
            kv_b_proj=_no_projection,
        )

    def warm_up_layers(self) -> None:
        """See the base class; all latent layers of a model are alike."""
        layer, dtype = self.layers[0], self.facts.dtype
        impl = self._new_impl(layer)
        heads, columns = impl.num_heads, self._nope + self._value
        blank = torch.zeros(heads * columns, self._rank, dtype=dtype, device=self.facts.device)
        impl.kv_b_proj = Projections(blank)
        impl.process_weights_after_loading(dtype)
        rows = power_of_two(min(self._most[1], MOST_WARM_ROWS))
        for builder in (
            self._builder(self.max_reqs, 1, by_row=False),
            self._builder(rows, rows, by_row=True),
        ):
            impl.warm_up(self._scales, self._pages(layer), builder, dtype)

    def _write(
        self,
        k: torch.Tensor,
        k_rope: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        step: Step,
    ) -> None:
        tokens, cache = step.num_tokens, self._pages(layer)
        if k_rope is None:
            joined = rows_of(k, 1, self._rank + self._rope)
            k, k_rope = joined[..., : self._rank], joined[..., self._rank :]
        latent = rows_of(k, 1, self._rank)[:tokens, 0]
        rope = rows_of(k_rope, 1, self._rope)[:tokens]
        impl = self._impl(layer)
        slots = step.new_slots(forward_batch.out_cache_loc, False)[:tokens]
        impl.do_kv_cache_update(latent, rope, cache, slots, self._cache, self._scales._k_scale)

    def _attend_latent(
        self, query: torch.Tensor, q_rope: torch.Tensor | None, layer: Any, step: Step, lse: bool
    ) -> Any:
        cache = self._pages(layer)
        impl = self._impl(layer)
        record = self._record(step, LATENT)
        given: Any = query
        if q_rope is not None:
            given = query, rows_of(q_rope, layer.tp_q_head_num, self._rope)
        output, values = impl.forward_mqa(given, cache, record, self._scales)
        return result_of(output, values if lse else None)

    def _attend_expanded(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, step: Step, return_lse: bool
    ) -> Any:
        heads, size, size_v = layer.tp_q_head_num, layer.head_dim, layer.v_head_dim
        tokens, query = step.num_tokens, rows_of(q, heads, size)
        key, value = rows_of(k, heads, size), rows_of(v, heads, size_v)
        output = query.new_empty(len(query), heads, size_v)
        lse = None
        if return_lse:
            lse = query.new_full(query.shape[:2], float("-inf"), dtype=torch.float32)
        if len(query) > tokens:
            output[tokens:] = 0
        from attn.kernels.dense.launcher import DenseLauncher
        from attn.kernels.dense.tensors import DenseLayer, DenseTensors

        attender = self._attenders.get(layer)
        if attender is None:
            attender = self._attenders[layer] = DenseLauncher(
                DenseLayer(
                    num_heads=heads,
                    num_kv_heads=heads,
                    head_size=size,
                    head_size_v=size_v,
                    scale=layer.scaling,
                    cache_dtype=CacheDType.AUTO,
                    causal=True,
                )
            )
        scale = self._scales._k_scale
        plan: LatentPrefill = self._record(step, EXPANDED)
        own = KVViews(key, value)
        if plan.context is None:
            tensors = DenseTensors(query, own, output, scale, scale, lse=lse)
            attender.attend(plan.own, tensors)
            return result_of(output, lse)
        if return_lse:
            raise NotImplementedError("expanded keys of cached tokens have no log-sum-exp")
        impl = self._impl(layer)
        impl.kv_b_proj = projections_of(self._modules[layer], self.facts.dtype)
        impl.process_weights_after_loading(self.facts.dtype)
        impl.attend_with_context(query, own, self._pages(layer), plan, scale, output)
        return result_of(output, None)


class Projections(NamedTuple):
    """The projection of latent rows to keys and values of every head."""

    weight: torch.Tensor
    """``[H * (P + V), L]``."""


def has_projections(module: Any, dtype: torch.dtype) -> bool:
    """Whether :func:`projections_of` serves a module."""
    if _is_plain(module, dtype):
        return True
    parts = [getattr(module, name, None) for name in ("w_kc", "w_vc")]
    served = dtype, torch.float8_e4m3fn
    is_blockwise = getattr(module, "use_deep_gemm_bmm", False)
    return not is_blockwise and all(one is not None and one.dtype in served for one in parts)


def projections_of(module: Any, dtype: torch.dtype) -> Projections:
    """The projections of a module of latent attention, in the model's type.

    Args:
        module: SGLang's module. It has them as a layer's weight, and as ``w_kc`` ``[H, P, L]`` and
            ``w_vc`` ``[H, L, V]``, which are e4m3 with one scale where the weight has other scales.
        dtype: the model's.
    """
    if _is_plain(module, dtype):
        return Projections(module.kv_b_proj.weight)
    joined = torch.cat([module.w_kc.to(dtype), module.w_vc.to(dtype).transpose(1, 2)], 1)
    if module.w_kc.dtype != dtype:
        joined = joined * module.w_scale
    return Projections(joined.to(dtype).flatten(0, 1))


def _is_plain(module: Any, dtype: torch.dtype) -> bool:
    weight = getattr(module.kv_b_proj, "weight", None)
    return weight is not None and weight.dtype == dtype


def one_token_each(batch: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """A batch with a request for every token of another; nothing is read back from the device.

    Args:
        batch: the batch; its block table is repeated for each token of a request.
    """
    starts, tokens = batch.query_start_loc, batch.num_actual_tokens
    place = torch.arange(tokens, dtype=torch.int32, device=starts.device)
    owner = torch.searchsorted(starts[1:].contiguous(), place, right=True)
    owner = owner.clamp(max=batch.num_reqs - 1)
    behind = starts[1:][owner] - 1 - place
    return batch.replace(
        query_start_loc=torch.arange(tokens + 1, dtype=torch.int32, device=starts.device),
        query_start_loc_cpu=torch.arange(tokens + 1, dtype=torch.int32),
        seq_lens=(batch.seq_lens[owner] - behind).clamp(min=0),
        num_reqs=tokens,
        max_query_len=1,
        block_table_tensor=batch.block_table_tensor[owner],
    )


def _no_projection(*args: Any) -> None:
    """SGLang's model projects; an impl that is given no latent prompts never does."""
    raise NotImplementedError("SGLang's model projects latent rows")
