"""Settings of the serving engine that builders and the selector read."""

from __future__ import annotations

from enum import StrEnum, unique
from typing import Self

from pydantic import StrictBool, model_validator

from specs.attention import MlaKernel
from specs.base import NonNegativeInt, PositiveFloat, PositiveInt, Spec
from specs.positions import MOST_POSITIONS, TokenCount
from specs.sparse_mla import SparseKernel


class ParallelConfig(Spec):
    """How one model is spread over devices."""

    tensor_parallel_size: PositiveInt = 1
    """Ranks over which the heads of one model are divided."""
    decode_context_parallel_size: PositiveInt = 1
    """Ranks over which the KV tokens of one request are striped (DCP)."""
    decode_context_parallel_rank: NonNegativeInt = 0
    """This rank, of the DCP ranks."""
    dcp_interleave: PositiveInt = 1
    """Consecutive tokens on one DCP rank before the next rank's turn."""
    prefill_context_parallel_size: PositiveInt = 1
    """Ranks over which the tokens of a prefill are divided."""

    @model_validator(mode="after")
    def _rank_is_in_range(self) -> Self:
        """The DCP rank is below the DCP size."""
        if self.decode_context_parallel_rank >= self.decode_context_parallel_size:
            raise ValueError(
                f"decode_context_parallel_rank must be below decode_context_parallel_size "
                f"({self.decode_context_parallel_size}), got {self.decode_context_parallel_rank}"
            )
        return self

    @model_validator(mode="after")
    def _turn_fits_positions(self) -> Self:
        """A turn of all DCP ranks is no longer than positions go."""
        turn = self.dcp_interleave * self.decode_context_parallel_size
        if turn > MOST_POSITIONS:
            raise ValueError(
                f"dcp_interleave ({self.dcp_interleave}) times decode_context_parallel_size "
                f"({self.decode_context_parallel_size}) must be at most {MOST_POSITIONS}, got "
                f"{turn}"
            )
        return self


class SpeculativeConfig(Spec):
    """Speculative decoding: drafts per step."""

    num_speculative_tokens: PositiveInt
    """k drafts per step; a verify query has 1 + k tokens."""
    parallel_drafting: StrictBool = False
    """All drafts come from one forward: a verify query can hold 1 + 2k tokens."""

    @property
    def max_decode_query_len(self) -> int:
        """Longest query of a decode row."""
        return 1 + self.num_speculative_tokens * (2 if self.parallel_drafting else 1)


@unique
class PrefillKernel(StrEnum):
    """Which kernel of a dense backend takes the requests with many new tokens."""

    AUTO = "auto"
    """The Hopper kernel for every layer that it serves, else the portable kernel."""
    TRITON = "triton"
    """The portable kernel, in Triton, on every GPU."""
    HOPPER = "hopper"
    """The Hopper kernel, in Gluon, for compute capability 9.0; a layer that it does not serve is
    refused. Attention over a shared prefix is the portable kernel's even so."""


@unique
class DecodeKernel(StrEnum):
    """Which kernel of a dense or latent backend takes the requests with few new tokens."""

    AUTO = "auto"
    """The Hopper kernel for every group of layers that it serves and where it measured faster, else
    the portable kernel. Dense layers of head sizes 72 to 256 use it, except layers of 104 to 120
    over 16 bits, and layers behind a window or in a chunk where a tile has 17 to 32 query rows.
    Dense layers of head size 64 use it without window and chunk where a tile has more than 32 query
    rows. With batch invariance dense layers use it where a tile has up to 16 query rows, and at
    head sizes 72 to 128 over 16 bits up to 64. Latent layers use it; with batch invariance only
    those with at most 16 query rows (heads x tokens), or an e4m3 cache."""
    TRITON = "triton"
    """The portable kernel, in Triton, on every GPU."""
    HOPPER = "hopper"
    """The Hopper kernel, in Gluon, for compute capability 9.0; a layer that it does not serve is
    refused."""


class DenseKernels(Spec):
    """Which kernels serve dense layers, where the backend has a choice: TRITON_ATTN's."""

    prefill: PrefillKernel = PrefillKernel.AUTO
    """Takes the requests with many new tokens."""
    decode: DecodeKernel = DecodeKernel.AUTO
    """Takes the rows with few new tokens."""


class LatentKernels(Spec):
    """Which kernels serve latent (MLA) layers over all cached tokens.

    ``prefill`` is read by every backend whose prefill TRITON_MLA's kernels compute, ``decode`` by
    TRITON_MLA, and by TRTLLM_MLA where ``rows`` names Triton.
    """

    prefill: PrefillKernel = PrefillKernel.AUTO
    """Takes the requests with many new tokens, over expanded keys and values."""
    decode: DecodeKernel = DecodeKernel.AUTO
    """Takes the rows with few new tokens, in latent space."""
    rows: MlaKernel = MlaKernel.AUTO
    """Takes the rows of a step that TRTLLM_MLA attends in latent space."""


class SparseKernels(Spec):
    """Which kernels serve latent layers over lists of tokens: SPARSE_MLA's.

    ``prefill`` and ``decode`` choose a library. The library's own kernel (``triton_sparse``) has a
    portable form and a Hopper form; ``own_prefill`` and ``own_decode`` choose between the two.
    """

    prefill: SparseKernel = SparseKernel.TRITON_SPARSE
    """Takes the requests with many new tokens."""
    decode: SparseKernel = SparseKernel.TRITON_SPARSE
    """Takes the rows with few new tokens."""
    own_prefill: PrefillKernel = PrefillKernel.AUTO
    """Form of the library's own kernel, where it takes the requests with many new tokens."""
    own_decode: DecodeKernel = DecodeKernel.AUTO
    """Form of the library's own kernel, where it takes the rows with few new tokens."""


class Kernels(Spec):
    """Which kernels serve a step, per family of layers."""

    dense: DenseKernels = DenseKernels()
    latent: LatentKernels = LatentKernels()
    sparse: SparseKernels = SparseKernels()

    @classmethod
    def own(
        cls,
        prefill: PrefillKernel = PrefillKernel.AUTO,
        decode: DecodeKernel = DecodeKernel.AUTO,
        rows: MlaKernel = MlaKernel.AUTO,
    ) -> Self:
        """One choice between the portable and the Hopper kernel, for all families.

        Args:
            prefill: kernel of the requests with many new tokens.
            decode: kernel of the rows with few new tokens.
            rows: kernel of TRTLLM_MLA's rows.
        """
        return cls(
            dense=DenseKernels(prefill=prefill, decode=decode),
            latent=LatentKernels(prefill=prefill, decode=decode, rows=rows),
            sparse=SparseKernels(own_prefill=prefill, own_decode=decode),
        )


class EngineConfig(Spec):
    """The few settings that a builder needs; vLLM's config is translated into this."""

    max_model_len: TokenCount
    """Longest sequence, in tokens."""
    max_encoder_len: PositiveInt | None = None
    """Longest input of an encoder, in tokens, that cross attention reads; None is
    ``max_model_len``."""
    max_num_seqs: PositiveInt = 256
    """Most requests in a step."""
    max_num_batched_tokens: TokenCount = 8192
    """Most tokens in a step."""
    num_heads: PositiveInt | None = None
    """Query heads that a rank attends with: under DCP those of all ranks that share keys. None when
    the builder does not need them."""
    cudagraph_capture_sizes: tuple[PositiveInt, ...] = ()
    """Batch sizes, in tokens, that the engine captures. This library's builders serve any size and
    do not read it; builders of other packages may."""
    parallel: ParallelConfig = ParallelConfig()
    """How the model is spread over devices."""
    speculative: SpeculativeConfig | None = None
    """Drafts per step; None without speculative decoding."""
    batch_invariant: StrictBool = False
    """Same bits for a request whatever shares its batch and however its prefill is chunked."""
    rswa_window: PositiveInt | None = None
    """Window of reference sliding-window attention (R-SWA): the prefix stays visible."""
    kernels: Kernels = Kernels()
    """Which kernels serve a step, where a backend has a choice."""
    logits_soft_cap: PositiveFloat | None = None
    """Soft cap of the group's layers, for builders whose plan depends on it; None means no cap."""
    has_sinks: StrictBool = False
    """The group's layers have sinks, for builders whose kernels take sinks at some shapes only."""
    softmax_scale: PositiveFloat | None = None
    """Factor that the group's layers multiply q.k by, for builders whose plan holds it."""
    exact_host_lengths: StrictBool = True
    """``query_start_loc_cpu`` and ``seq_lens_cpu_upper_bound`` of every batch equal the device's
    lengths. False where the host does not know them: with asynchronous speculation, and with static
    sinks, which vLLM adds on the device."""
    index_topk: PositiveInt | None = None
    """Tokens that a sparse MLA layer attends."""
    dense_short_prompts: StrictBool = False
    """Prefills of sparse MLA layers attend every key that they see, over keys expanded for every
    head, in a step in which none of their requests has more tokens than ``index_topk``. Their lists
    are not read. A batch-invariant engine ignores this."""
    skip_prefill: StrictBool = False
    """The layers are a draft model's that only decodes: TRTLLM_MLA's builder makes no room for
    prefill, and refuses it. Other builders ignore this."""
    fp8_mla_prefill: StrictBool = False
    """Prefill over an fp8 latent cache rounds queries, keys and values to e4m3 as well, which
    TRTLLM_MLA's kernels multiply faster. It costs accuracy and is therefore off by default."""
    fp8_mla_queries: StrictBool = False
    """Decodes over an e4m3 latent cache may round queries to e4m3, by a power of two for each query
    row. It costs accuracy and is therefore off by default. TRITON_MLA's Hopper kernel for more than
    32 query rows (heads x tokens) does, which makes it faster; other kernels keep queries as they
    are."""
    mla_workspace_bytes: PositiveInt | None = None
    """Most bytes of cached context that an MLA step holds at a time in expanded form, or converted
    for a sparse kernel; None leaves the bound to the backend."""

    prefill_workspace_bytes: NonNegativeInt | None = None
    """Most bytes of dequantised keys and values that prefills over a quantised cache hold at a
    time, for kernels that can read them; 0 for none, None leaves the bound to the backend."""

    @property
    def max_decode_query_len(self) -> int:
        """Longest query of a decode row: 1, or 1 + k with speculation."""
        return 1 if self.speculative is None else self.speculative.max_decode_query_len
