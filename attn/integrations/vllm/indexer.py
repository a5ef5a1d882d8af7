"""vLLM's indexer of sparse layers (DeepSeek-V3.2, GLM-5) by our kernels, without DeepGEMM.

An indexer of vLLM's is a module with projections, a cache layer of its own and an op. The sparse
impl of a layer is given the layer's indexer when vLLM makes the layer, before weights are loaded,
and calls :func:`adopt`. From then on this one indexer is ours:

- Its cache layer names :class:`IndexerBackend`, whose builder plans steps for our kernels, so
  vLLM's builder, which calls DeepGEMM, never sees them. Pages and their bytes are vLLM's.
- vLLM's op ``vllm::sparse_attn_indexer`` runs our kernels for it. Both ways to the op are taken:
  the dispatcher's kernel, which compiled graphs call, and the name of the Python function in the
  module of the indexer's class, which the models of ``vllm.models.deepseek_v32`` call, with keys
  that they have stored themselves. The op keeps its name, schema and fake, so that a compiled graph
  is the same, and split at the same places, with our kernels or vLLM's.

An indexer that was not adopted runs vLLM's function. Before the first adoption nothing is replaced.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers import sparse_attn_indexer as vllm_op
from vllm.platforms import current_platform
from vllm.utils.torch_utils import _resolve_layer_name
from vllm.v1.attention.backend import AttentionMetadataBuilder as VllmBuilder
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend

from attn.impls.sparse.indexer import IndexInputs, SparseIndexer
from attn.integrations.vllm import ahead, choice, compat, translate
from builders.sparse.indexer import IndexerMetadataBuilder, scratch_of, selection_bytes
from specs.devices import DeviceKind
from specs.kv_cache import IndexerSpec
from specs.rows import INDEXER_PAGE, SCALE_BYTES

logger = init_logger("vllm.attn_backends")

NAME: Final = "ATTN_BACKENDS_INDEXER"
_OP: Final = "sparse_attn_indexer"
_ADOPTED: Final = "attn_backends_adopted"
_E4M3: Final = torch.float8_e4m3fn
_CACHE_DTYPES: Final = ("auto", "fp8", "fp8_e4m3")

_reserved: dict[torch.device, torch.Tensor] = {}
"""Memory of each device that a profiling run took, until a builder takes its own."""
_libraries: dict[str, Any] = {}
"""Our kernel of vLLM's op by dispatch key; the kernel lives as long as its library."""


@dataclass
class Adopted:
    """What is known of an indexer that our kernels serve."""

    heads: int
    """Heads of the indexer, all on every rank."""
    topk: int
    """Entries of a list."""
    vllm_config: Any
    """The configuration that the indexer was made with."""
    is_planned: bool = False
    """True once a builder of the indexer's group is made."""


def adopt(indexer: Any) -> None:
    """Serve an indexer of vLLM's by our kernels; a layer's sparse impl calls this when it is made.

    An indexer whose op is another class, such as another plugin's, stays as it is; the log says so.

    Args:
        indexer: vLLM's module, with ``k_cache`` and ``indexer_op``.

    Raises:
        ValueError: the configuration asks for what our kernels do not serve; the message has every
            reason.
    """
    op = indexer.indexer_op
    if type(op) is not vllm_op.SparseAttnIndexer:
        logger.warning_once(
            "attn-backends: the indexer's op is %s.%s, not vLLM's, and stays so",
            *(type(op).__module__, type(op).__qualname__),
        )
        return
    cache = indexer.k_cache
    config = get_current_vllm_config()
    problems = [*reasons(config), *_module_reasons(indexer)]
    if problems:
        raise ValueError(
            "attn-backends cannot serve the sparse indexer with this configuration. Reason: "
            f"{problems}"
        )
    setattr(cache, _ADOPTED, Adopted(indexer.n_head, op.topk_tokens, config))
    cache.get_attn_backend = lambda: IndexerBackend
    if choice.device_of(current_platform.get_device_capability()) is DeviceKind.SM80:
        # vLLM's fused kernel converts to e4m3 in hardware, which these GPUs lack.
        indexer.use_fused_indexer_q = False
    serve_op(current_platform.dispatch_key)
    for cls in type(indexer).__mro__:
        module = sys.modules[cls.__module__]
        if getattr(module, _OP, None) is vllm_op.sparse_attn_indexer:
            setattr(module, _OP, indexer_step())


def reasons(vllm_config: Any) -> list[str]:
    """Why our kernels cannot serve the indexers of an engine, in vLLM's style.

    Args:
        vllm_config: vLLM's configuration.
    """
    parallel, found = vllm_config.parallel_config, []
    dtype = compat.indexer_cache_dtype(vllm_config)
    if dtype not in _CACHE_DTYPES:
        found.append(f"indexer cache of {dtype} not supported (served: {', '.join(_CACHE_DTYPES)})")
    ranks = parallel.prefill_context_parallel_size
    if ranks > 1:
        found.append(f"prefill_context_parallel_size {ranks} not supported by the indexer")
    topk = compat.indexer_topk_backend(vllm_config)
    if topk != "auto":
        found.append(
            f"sparse_indexer_topk_backend {topk!r} not supported (it names a kernel of vLLM's)"
        )
    return found


def _module_reasons(indexer: Any) -> list[str]:
    """Why our kernels cannot serve an indexer as the model made it."""
    op, cache = indexer.indexer_op, indexer.k_cache.cache_config
    wanted = {
        "quant_block_size": (op.quant_block_size, op.head_dim),
        "scale_fmt": (op.scale_fmt, "ue8m0"),
        "use_fp4_cache": (op.use_fp4_cache, False),
        "compress_ratio": (getattr(op, "compress_ratio", 1), 1),
        "candidate_blocks": (getattr(op, "candidate_blocks", None), None),
    }
    found = [
        f"indexer {name} {got!r} not supported (served: {served!r})"
        for name, (got, served) in wanted.items()
        if got != served
    ]
    # A block size that nobody named is chosen later, to fit every backend.
    if cache.user_specified_block_size and cache.block_size % INDEXER_PAGE:
        found.append(
            f"block_size {cache.block_size} not supported by the indexer (its pages hold "
            f"{INDEXER_PAGE} tokens)"
        )
    return found


def serve_op(dispatch_key: str) -> None:
    """Put our kernel behind ``vllm::sparse_attn_indexer`` for one kind of device.

    Args:
        dispatch_key: the dispatcher's name of the kind, such as ``CUDA``.
    """
    if dispatch_key not in _libraries:
        library: Any = torch.library
        _libraries[dispatch_key] = library.Library("vllm", "IMPL")
        with warnings.catch_warnings():
            # torch warns of every kernel that is replaced; this one is meant to be.
            warnings.simplefilter("ignore", UserWarning)
            _libraries[dispatch_key].impl(_OP, indexer_step(), dispatch_key, allow_override=True)


@functools.cache
def indexer_step() -> Callable[..., torch.Tensor]:
    """The function that stands for vLLM's ``sparse_attn_indexer``."""
    theirs = vllm_op.sparse_attn_indexer
    names = tuple(inspect.signature(theirs).parameters)

    def sparse_attn_indexer(*given: Any, **named: Any) -> torch.Tensor:
        """List the keys of each token; arguments and result are those of vLLM's function."""
        values = dict(zip(names, given, strict=False)) | named
        context, name = get_forward_context(), _resolve_layer_name(values["k_cache_prefix"])
        adopted = getattr(context.no_compile_layers.get(name), _ADOPTED, None)
        if adopted is None:
            listed: torch.Tensor = theirs(*given, **named)
            return listed
        buffer: torch.Tensor = values["topk_indices_buffer"]
        if not isinstance(context.attn_metadata, dict):
            # The profiling run, by which vLLM finds out how much memory is left for the caches.
            _reserve(adopted, context.no_compile_layers[name], buffer.device)
            return buffer
        record, topk = context.attn_metadata[name], values["topk_tokens"]
        key = None if values["skip_k_cache_insert"] else values["k"]
        _indexer(buffer[:, :topk], record.stripe is not None).forward(
            IndexInputs(values["q_quant"], key, values["weights"], values["kv_cache"], record)
        )
        if buffer.shape[1] > topk:
            buffer[: record.num_actual_tokens, topk:] = -1
        return buffer

    # As with vLLM's function, a graph that is captured piece by piece has a gap here.
    step: Callable[..., torch.Tensor] = vllm_op.eager_break_during_capture(sparse_attn_indexer)
    return step


def _indexer(lists: torch.Tensor, shares_keys: bool) -> SparseIndexer:
    """The object that writes ``lists``; ranks that share keys exchange candidates."""
    indexer = SparseIndexer(lists)
    if shares_keys:
        indexer.all_gather = compat.gather_ranks
    return indexer


def _reserve(adopted: Adopted, cache: Any, device: torch.device) -> None:
    """Take the memory of the builder and of selections, so that vLLM gives none of it to caches."""
    if adopted.is_planned or device in _reserved:
        return
    spec = cache.get_kv_cache_spec(adopted.vllm_config)
    ranks = compat.dcp_ranks_of(adopted.vllm_config)
    config = translate.engine_config(adopted.vllm_config, spec, adopted.heads, *ranks)
    scratch = scratch_of(config, spec.head_size - SCALE_BYTES).values()
    nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in scratch)
    nbytes += selection_bytes(config, adopted.topk)
    _reserved[device] = torch.empty(nbytes, dtype=torch.uint8, device=device)


class IndexerBuilder(IndexerMetadataBuilder, VllmBuilder):  # type: ignore[misc]
    """Our builder of indexers, made from vLLM's objects. It takes vLLM's batches."""

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: Sequence[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        """
        Args:
            kv_cache_spec: vLLM's, with the kernel's block size.
            layer_names: cache layers of the group's indexers.
            vllm_config: vLLM's.
            device: where the records' tensors live.

        Raises:
            ValueError: blocks of another size than the indexer's pages, or whatever our builder
                refuses.
        """
        # Cache layers have no impl, so they are not among the layers that ``translate`` knows.
        context = vllm_config.compilation_config.static_forward_context
        adopted = [getattr(context[name], _ADOPTED) for name in layer_names if name in context]
        _reserved.pop(device, None)
        spec = IndexerSpec(
            block_size=kv_cache_spec.block_size,
            index_head_dim=kv_cache_spec.head_size - SCALE_BYTES,
            dtype=vllm_config.model_config.dtype,
        )
        heads = {one.heads for one in adopted}
        most = max(heads, default=1)
        # A draft model may keep its keys whole while ranks share those of the model it drafts for.
        ranks = compat.dcp_ranks_of(adopted[0].vllm_config if adopted else vllm_config)
        config = translate.engine_config(vllm_config, kv_cache_spec, most, *ranks)
        super().__init__(spec, layer_names, config, device)
        # vLLM's block tables are as wide as its longest sequence needs, but dummy batches before a
        # capture have longer lengths, so the table's width is not checked.
        self.step_limits = self.step_limits.without_table()
        # As vLLM's own builder of indexers, this one has no say in the order of requests.
        self.reorder_batch_threshold = None
        logger.info(
            "attn-backends: the indexer serves %d layers (%s, ...): heads %s, lists of %d, keys "
            "of %d in pages of %d",
            *(len(layer_names), layer_names[0], sorted(heads), self.topk, self.head_dim),
            spec.block_size,
        )
        if device.type == "cuda":
            with ahead.warming_up():
                for count in sorted(heads):
                    self._warm_up(count)
        for one in adopted:
            one.is_planned = True

    def _warm_up(self, heads: int) -> None:
        """Compile the kernels of all steps of indexers with a number of heads."""
        dtype = self.kv_cache_spec.dtype.torch
        query = torch.zeros(1, heads, self.head_dim, device=self.device).to(_E4M3)
        key = torch.zeros(1, self.head_dim, dtype=dtype, device=self.device)
        cache = self.kv_cache_spec.layout().allocate(2, self.device)
        lists = torch.empty(self.threshold + 1, self.topk, dtype=torch.int32, device=self.device)
        _indexer(lists, self.stripe is not None).warm_up(query, key, cache, self)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """Which batches a captured graph can replay, as a member of vLLM's enumeration."""
        return compat.cudagraph_support(cls._cudagraph_support.value)

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int:
        """Most tokens of a request in a captured batch whose requests differ in tokens.

        Rows find their requests on the device, so any number up to that of a verify is served. Only
        vLLM 0.33 calls this.
        """
        return translate.engine_config(vllm_config, kv_cache_spec, 1).max_decode_query_len


class IndexerBackend(DeepseekV32IndexerBackend):  # type: ignore[misc]
    """vLLM's backend of indexers' caches with our builder; pages and their bytes are vLLM's."""

    @staticmethod
    def get_name() -> str:
        """A name of its own: by its own backend's name vLLM warms up kernels of its own."""
        return NAME

    @staticmethod
    def get_builder_cls() -> type[IndexerBuilder]:
        """Our builder."""
        return IndexerBuilder

    @classmethod
    def supports_pcp(cls) -> bool:
        """False: queries are not divided over ranks."""
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """True: rows of decodes find their requests on the device. Only vLLM 0.33 calls this."""
        return True
