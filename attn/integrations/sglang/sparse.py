"""Sparse latent layers (DSA) in SGLang: our kernels over the lists that its indexer makes.

SGLang serves models with an indexer by its backend ``dsa`` alone: it asks for that name in many
places. This backend is that one, with its own metadata, indexer and lists; what is replaced is the
attention of the listed tokens. Prompts attend their lists too, short ones included.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention

from attn.impls.warm import run_compiled
from attn.integrations.sglang import checks, compat
from attn.integrations.sglang.backend import log_served
from attn.ops.sparse_mla import sparse_mla
from builders.buffers import GraphBuffers
from builders.device import device_facts, runs_gluon
from builders.sparse.arguments import ListedRows
from builders.sparse.hopper_tiles import sparse_kernel_of
from builders.sparse.launches import SparseLaunch, SparseLaunches
from builders.sparse.tiles import SparseShape
from specs.dtypes import DType
from specs.engine import PrefillKernel
from specs.rows import LatentFormat
from specs.sparse_mla import SparsePhase

BACKEND: Final = "SPARSE_MLA"
OVER_SLOTS: Final = "tilelang"
"""SGLang's name of a kernel that takes, in every step, whole queries and lists of slots. Its call
is replaced by ours, so that SGLang prepares these, and nothing else."""
PHASE: Final = SparsePhase.PREFILL


class ListedAttention:
    """Attention of query rows over listed slots of a latent pool, by the library's kernels."""

    def __init__(
        self, shape: SparseShape, dtype: torch.dtype, most_rows: int, is_invariant: bool
    ) -> None:
        """
        Args:
            shape: the layers.
            dtype: type of the queries.
            most_rows: query rows of a launch, at most; a step with more takes several.
            is_invariant: a row's bits must depend on the row alone.
        """
        self.shape, self.dtype, self.most_rows = shape, dtype, most_rows
        self.is_invariant = is_invariant
        self._launches: dict[torch.device, SparseLaunches] = {}

    def attend(
        self, query: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attend every row's list.

        Args:
            query: ``[T, H, L + r]``.
            rows: ``[slots, 1, row]``: a layer's pool.
            slots: ``[T, K]`` int32: listed slots; -1 for none.
            scale: multiplies q.k.

        Returns:
            ``[T, H, L]``; zero for an empty list.
        """
        out = query.new_empty(*query.shape[:2], self.shape.rank)
        launches, first = self._on(query.device), 0
        while first < len(query):
            count = min(len(query) - first, self.most_rows)
            launch = launches.of(count, PHASE)
            part = slice(first, first + min(count, launch.rows))
            self._attend((query[part], slots[part], out[part]), rows, scale, launch)
            first = part.stop
        return out

    def warm_up(self, rows: torch.Tensor, scale: float) -> None:
        """Compile every kernel variant that serving will need, by lists that name no slot.

        Args:
            rows: a layer's pool, which is neither read nor written.
            scale: multiplies q.k.
        """
        shape, device = self.shape, rows.device
        width = shape.rank + shape.rope_size
        query = torch.zeros(1, shape.num_heads, width, dtype=self.dtype, device=device)
        slots = torch.full((1, shape.topk), -1, dtype=torch.int32, device=device)
        out = query.new_empty(1, shape.num_heads, shape.rank)

        def run_steps() -> None:
            for launch in self._on(device).variants(PHASE):
                self._attend((query, slots, out), rows, scale, launch)

        run_compiled(run_steps, device)

    def _attend(
        self,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rows: torch.Tensor,
        scale: float,
        launch: SparseLaunch,
    ) -> None:
        """Attend by one launch; ``tensors`` are queries, slots and output."""
        query, slots, out = tensors
        rank, layout = self.shape.rank, self.shape.layout
        if layout is not LatentFormat.BF16:
            rows = rows.view(torch.uint8)
        cache = rows.view(1, len(rows), rows.shape[-1])
        listed = ListedRows(cache, layout, slots, None, None)
        sparse_mla(query[..., :rank], query[..., rank:], listed, scale, out, launch=launch)

    def _on(self, device: torch.device) -> SparseLaunches:
        found = self._launches.get(device)
        if found is None:
            options = None
            if runs_gluon(device):
                kind, dtype = device_facts(device).kind, DType.parse(self.dtype)
                options, _ = sparse_kernel_of(
                    *(self.shape, kind, dtype, self.is_invariant),
                    *("kernels.sparse.own_prefill", PrefillKernel.AUTO),
                )
            found = self._launches[device] = SparseLaunches(
                *(self.shape, self.most_rows, self.is_invariant, {PHASE: options}),
                GraphBuffers(device),
            )
        return found

    @property
    def phase_kernels(self) -> dict[str, str]:
        """Which kernel takes the rows, on the devices that have been served."""
        names = {"hopper" if one.is_hopper(PHASE) else "triton" for one in self._launches.values()}
        return {"lists": "/".join(sorted(names))}


class SparseBackend(DeepseekSparseAttnBackend):  # type: ignore[misc]
    """SGLang's backend of DSA models, whose attention is ours."""

    def __init__(self, model_runner: Any, *args: Any, **kwargs: Any) -> None:
        """Take the arguments of SGLang's backend.

        Raises:
            ValueError: the engine or the model is not served; the message has every reason.
        """
        facts, model = compat.facts_of(model_runner), model_runner.model_config
        layers = [one for one in model_runner.model.modules() if isinstance(one, RadixAttention)]
        checks.check(facts, layers, checks.SPARSE_POOLS)
        super().__init__(model_runner, *args, **kwargs)
        self.dsa_prefill_impl = self.dsa_decode_impl = OVER_SLOTS
        self.enable_auto_select_prefill_impl = False
        widths = int(model.kv_lora_rank), int(model.qk_rope_head_dim)
        layout = checks.layout_of(model_runner.token_to_kv_pool, *widths)
        heads = int(layers[0].tp_q_head_num)
        self.attention = ListedAttention(
            SparseShape(heads, int(self.dsa_index_topk), layout, facts.dtype.itemsize, *widths),
            *(facts.dtype, max(facts.max_tokens, facts.max_reqs * facts.draft_tokens)),
            facts.is_deterministic,
        )
        self.is_logged, self.facts, self._first = False, facts, layers[0]

    def warm_up(self) -> None:
        """Compile the kernels of the layers; SGLang's own are compiled by its graphs."""
        rows = self.token_to_kv_pool.get_key_buffer(self._first.layer_id)
        self.attention.warm_up(rows, self._first.scaling)

    def set_dsa_prefill_impl(self, forward_batch: Any = None) -> None:
        """Have prompts attend lists; SGLang would expand the keys of short ones."""
        self.use_mha = False

    def _forward_tilelang(
        self,
        q_all: torch.Tensor,
        kv_cache: torch.Tensor,
        v_head_dim: int,
        page_table_1: torch.Tensor,
        sm_scale: float,
    ) -> torch.Tensor:
        """Attend lists of slots.

        Args:
            q_all: ``[T, H, L + r]``.
            kv_cache: ``[slots, 1, row]``: the layer's pool.
            v_head_dim: L.
            page_table_1: ``[T, K]`` int32: slots.
            sm_scale: multiplies q.k.

        Returns:
            ``[T, H, L]``.
        """
        assert v_head_dim == self.attention.shape.rank
        out = self.attention.attend(q_all, kv_cache, page_table_1, sm_scale)
        if not self.is_logged:
            self.is_logged, shape = True, self.attention.shape
            words = (
                f"sparse latent layers of {shape.num_heads} query heads, lists of {shape.topk}, "
                f"rows of {shape.rank} + {shape.rope_size}, {self.attention.dtype} over "
                f"{shape.layout.value} KV"
            )
            log_served(BACKEND, words, self.attention)
        return out
