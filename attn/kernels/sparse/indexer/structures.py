"""Structures of the indexer's Hopper kernel over gathered keys.

Triton reads the types of fields from the annotations of a class. This module must therefore not
postpone annotations.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attn.kernels.lang.compat import aggregate


@aggregate
class TokenBlock:
    """The query tokens of a program, and the keys that each of them sees."""

    starts_ptr: gl.tensor
    """``[T]`` int32, the first key that each token of the launch sees."""
    ends_ptr: gl.tensor
    """``[T]`` int32, one past the last."""
    first: gl.tensor
    """int32, the block's first token."""
    num_rows: gl.tensor
    """int32, T."""
    num_keys: gl.tensor
    """int32, gathered keys."""
    count: gl.tensor
    """int32, tokens of a block, at most MOST."""
    MOST: gl.constexpr
    """int, a multiple of 32."""


@aggregate
class KeyTile:
    """A tile of keys in shared memory."""

    boxes: gl.shared_memory_descriptor
    """``[TILE / 64, 64, 128]`` uint8, as TMA writes them."""
    tiles: gl.shared_memory_descriptor
    """``[TILE / 64, 64, 128]`` e4m3: the bytes of ``boxes``, as products read them."""
    full: gl.shared_memory_descriptor
    """``[1]`` mbarrier: the tile is there."""
    empty: gl.shared_memory_descriptor
    """``[1]`` mbarrier: all warp groups have the tile in their registers."""
    TILE: gl.constexpr
    """int, keys of the tile."""


@aggregate
class QueryRing:
    """Stages in shared memory, through which the queries and weights of tokens come."""

    boxes: gl.shared_memory_descriptor
    """``[STAGES, 1, HEADS, 128]`` uint8, as TMA writes them."""
    tiles: gl.shared_memory_descriptor
    """``[STAGES, HEADS, 128]``, the same as e4m3, as products read them."""
    weight_boxes: gl.shared_memory_descriptor
    """``[STAGES, 1, HEADS]`` fp32, weights as TMA writes them."""
    weights: gl.shared_memory_descriptor
    """``[STAGES, HEADS]`` fp32, the same."""
    full: gl.shared_memory_descriptor
    """``[STAGES, 1]`` mbarriers: the token is there."""
    empty: gl.shared_memory_descriptor
    """``[STAGES, 1]`` mbarriers: all warp groups have read the token."""
    HEADS: gl.constexpr
    """int, columns of a product; heads that are not there have queries and weights of 0."""
    STAGES: gl.constexpr
    """int, tokens that are under way, a power of two."""

    @gluon.jit
    def stage_of(self, turn):
        """The stage of that turn."""
        # A remainder of a number that might be negative takes four instructions more.
        return turn & (self.STAGES - 1)

    @gluon.jit
    def parity_of(self, turn):
        """The parity of that turn's phase of its stage."""
        return (turn >> (self.STAGES.bit_length() - 1)) & 1

    @gluon.jit
    def wait_full(self, turn):
        """Wait until the token of that turn is there."""
        mbarrier.wait(self.full.index(self.stage_of(turn)), self.parity_of(turn))

    @gluon.jit
    def wait_empty(self, turn):
        """Wait until there is room for the token of that turn."""
        # A fresh barrier lets parity 1 pass at once.
        mbarrier.wait(self.empty.index(self.stage_of(turn)), self.parity_of(turn) ^ 1)

    @gluon.jit
    def give_back(self, turn):
        """Say that the warp group has read the token of that turn."""
        mbarrier.arrive(self.empty.index(self.stage_of(turn)), count=1)


@aggregate
class KeyRows:
    """128 keys that are the rows of two products, and which thread writes the logits of which."""

    near: gl.tensor
    """``[64, 128]`` e4m3, the first 64 keys, in registers."""
    far: gl.tensor
    """``[64, 128]`` e4m3, the others."""
    keys: gl.tensor
    """``[128]`` int32, a key for each thread, by its number among the gathered ones."""
    scales: gl.tensor
    """``[128]`` fp32, its scale."""
    lanes: gl.tensor
    """``[128]`` int32, the number of each thread."""


@aggregate
class LogitRows:
    """Where logits are written."""

    logits_ptr: gl.tensor
    """``[T, *]`` fp32; the first column of a token is that of the first key that it sees."""
    logits_row: gl.tensor
    """int32, elements from one token's logits to the next token's."""
