"""Groups of arguments that kernels in Gluon hand from one device function to the next.

A launch has flat arguments. A kernel makes the structures from them in its first lines, and a field
costs nothing over an argument: PTX is the same. A field that is written in capitals is a constexpr.

Triton reads the types of fields from the annotations of a class: they must not be postponed here.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn.kernels.lang.compat import aggregate
from attn.kernels.lang.masks import last_visible, masked, own_range, seen_by_all
from builders.splitkv.device.segments import first_visible

Optional = gl.tensor | gl.constexpr
"""A tensor; or a constexpr, where a launch gives None or a caller gives a plain number."""


@aggregate
class Mask:
    """Which keys a query sees, and where a request's own rules for that are."""

    causal_ptr: Optional
    """``[R]`` bool, whether each request is causal; read where CAUSAL is 2."""
    ranges_ptr: Optional
    """``[R, num_ranges, 2]`` int32, first and last position of ranges whose queries see each other,
    first above last where there is none; read with RANGES."""
    num_ranges: Optional
    """int32, ranges of a request."""
    window: Optional
    """int32, tokens: keys that a query sees, its own included; read with WINDOW or CLAMP."""
    chunk: Optional
    """int32, tokens of a chunk; read with CHUNK."""
    lookback: Optional
    """int32, chunks before its own that a query sees."""
    CAUSAL: gl.constexpr
    """0: no query is causal; 1: every one is; 2: as ``causal_ptr`` says."""
    WINDOW: gl.constexpr
    """bool, there is a window."""
    CHUNK: gl.constexpr
    """bool, there are chunks."""
    RANGES: gl.constexpr
    """bool, there are ranges."""
    CLAMP: gl.constexpr
    """bool, ranges end at the window."""

    @gluon.jit
    def ranges_of(self, req):
        """Pointer to the ranges of request ``req``."""
        ranges = self.ranges_ptr
        if self.RANGES:
            ranges = ranges + req.to(gl.int64) * self.num_ranges * 2
        return ranges

    @gluon.jit
    def keys_seen(self, req, first, last, kv_len):
        """What a request's queries from position ``first`` to ``last`` see: whether it is causal,
        and keys ``[start, stop)``.
        """
        causal = 1
        if self.CAUSAL == 2:
            causal = gl.load(self.causal_ptr + req).to(gl.int32)
        ranges = self.ranges_of(req)
        start = first_visible(
            first, last, self.window, self.chunk, self.lookback, ranges, self.num_ranges,
            self.WINDOW or self.CHUNK, self.CHUNK, self.RANGES, self.CLAMP,
        )  # fmt: skip
        stop = last_visible(
            last, kv_len, causal, self.window, ranges, self.num_ranges, first, self.CAUSAL,
            self.WINDOW, self.CHUNK, False, self.RANGES,
        )  # fmt: skip
        return causal, start, stop

    @gluon.jit
    def seen_by_all(self, first, last, kv_len, causal):
        """Keys ``[low, high)`` that every query from position ``first`` to ``last`` sees, ranges
        left out.
        """
        return seen_by_all(
            first, last, kv_len, causal, self.window, self.chunk, self.lookback, self.CAUSAL,
            self.WINDOW, self.CHUNK, False,
        )  # fmt: skip

    @gluon.jit
    def own_range(self, query, req):
        """First and last key of the ranges that queries ``[M]`` of request ``req`` lie in."""
        range_first = query
        range_last = query
        if self.RANGES:
            range_first, range_last = own_range(query, self.ranges_of(req), self.num_ranges)
        return range_first, range_last

    @gluon.jit
    def masked(self, scores, query, key, reach, kv_len, range_first, range_last):
        """Scores ``[M, N]`` of queries ``[M]`` and keys ``[N]``, -inf where a query does not see.

        ``reach`` ``[M]`` is the last key that causality and the request's length leave to a query,
        ``range_first`` and ``range_last`` ``[M]`` are those of :meth:`own_range`.
        """
        return masked(
            scores, query, key, reach, kv_len, self.window, self.chunk, self.lookback, 0,
            range_first, range_last, self.CAUSAL, self.WINDOW, self.CHUNK, False, self.RANGES,
            self.CLAMP,
        )  # fmt: skip


@gluon.jit
def causal_mask():
    """The mask of causal attention, without windows, chunks and ranges."""
    return Mask(
        causal_ptr=None, ranges_ptr=None, num_ranges=0, window=0, chunk=1, lookback=0, CAUSAL=1,
        WINDOW=False, CHUNK=False, RANGES=False, CLAMP=False,
    )  # fmt: skip
