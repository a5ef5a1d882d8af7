"""FlashInfer's paged wrappers without a GPU.

Every call is bound to a version's signature, checked against what the kernels need, and computed in
torch from exactly the tensors that were passed. What the kernels leave undefined is NaN here, and
keys that a mask hides are multiplied by zero, as kernels do with the tiles they load. A wrapper
that was planned once can be planned by its module; the difference to the real module cannot be seen
here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from builders.vendor import flashinfer
from builders.vendor.flashinfer_parts import install as flashinfer_compat
from builders.vendor.flashinfer_parts.install import FlashInfer, numbers_of
from tests.emulators.flashinfer_signatures import DECODE, PREFILL, SIGNATURES, signature

VERSIONS = tuple(SIGNATURES)
HEAD_DIMS = (64, 128, 256)
CUDA_CORE_GROUPS = (1, 2, 3, 4, 8)
ALIGNMENT = 16
WORKSPACE_BYTES = 1 << 16
MAX_REQUESTS = 32768

Mutation = Callable[[str, dict[str, Any]], None]
"""Changes the arguments of a call to ``__init__``, ``plan`` or ``run``, by name."""


class ContractError(Exception):
    """A call that FlashInfer, or one of its kernels, does not accept."""


def need(holds: bool, message: str) -> None:
    if not holds:
        raise ContractError(message)


class OnDevice(Tensor):
    """A tensor that stands for a GPU's: reading one of its values on the host is an error."""

    HOST_READS = ("item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "is_nonzero")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        magic = ("__bool__", "__int__", "__float__", "__index__", "__contains__", "__array__")
        if name in cls.HOST_READS or name in magic:
            raise AssertionError(f"{name} of a device tensor waits for the GPU")
        return super().__torch_function__(func, types, args, kwargs or {})


def on_device(tensor: Tensor) -> OnDevice:
    return tensor.as_subclass(OnDevice)


class MadeOnDevice(TorchFunctionMode):
    """Tensors made with ``device=`` count as the GPU's; tensors of the host are made without it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        is_new = isinstance(made, Tensor) and (kwargs or {}).get("device") is not None
        return on_device(made) if is_new else made


class _Wrapper:
    """The parts that both wrappers share."""

    version = VERSIONS[0]
    mutation: Mutation | None = None
    name: str
    names: dict[str, str]
    """Names of what ``plan`` is given."""
    buffer_names: dict[str, str]

    def _given(self, method: str, args: Any, kwargs: Any) -> dict[str, Any]:
        bound = signature(self.version, self.name, method).bind(self, *args, **kwargs)
        given = dict(bound.arguments)
        del given["self"]
        if self.mutation is not None:
            type(self).mutation(method.strip("_"), given)  # type: ignore[misc]
        return given

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = self._given("__init__", args, kwargs)
        workspace = given["float_workspace_buffer"]
        need(workspace.dtype == torch.uint8, f"workspace of {workspace.dtype}")
        need(workspace.data_ptr() % ALIGNMENT == 0, "workspace is not aligned")
        need(workspace.numel() >= WORKSPACE_BYTES, "workspace is too small")
        need(not workspace.any(), "workspace is not zero at first use")
        need(given.get("kv_layout") == "NHD", "layouts are said by strides here")
        need(given.get("backend") in ("fa2", "fa3"), "backend is left to FlashInfer")
        self.backend = given["backend"]
        self.is_graph = bool(given.get("use_cuda_graph"))
        self._backend, self.device = self.backend, workspace.device
        self.is_cuda_graph_enabled = self.is_graph
        self._float_workspace_buffer = workspace
        self._int_workspace_buffer = workspace.new_zeros(ALIGNMENT)
        self._pin_memory_int_workspace_buffer = torch.zeros(ALIGNMENT, dtype=torch.uint8)
        self._plan_info: dict[str, Any] | None = None
        self._max_total_num_rows: int | None = None
        self.buffers: dict[str, Tensor] = {}
        self.planned: dict[str, Any] | None = None
        self.given: dict[str, Any] | None = None
        self.tensor_cores = True
        for short, long in self.buffer_names.items():
            buffer = given.get(long)
            need((buffer is not None) == self.is_graph, f"{long} with a graph, and only then")
            if buffer is not None:
                _check_ints(long, buffer)
                self.buffers[short] = buffer
        if self.is_graph:
            requests = len(self.buffers["last"])
            for short in {"qo", "kv"} & set(self.buffers):
                need(len(self.buffers[short]) == requests + 1, f"{short} buffer's length")

    def plan(self, *args: Any, **kwargs: Any) -> None:
        self._plan_info = self._keep(self._given("plan", args, kwargs))
        self._cached_module = SimpleNamespace(plan=self._plan_again)

    def _keep(self, given: dict[str, Any]) -> dict[str, Any]:
        """Check a plan, and keep it where the kernels will look for it."""
        rest, names = dict(given), self.names
        kv, indices, last = (rest.pop(names[name]) for name in ("kv", "indices", "last"))
        own = torch.arange(len(last) + 1, dtype=torch.int32)
        qo = rest.pop(names["qo"]) if "qo" in names else own
        rest["head_dim"] = rest.pop(names["head_dim"]) if names["head_dim"] in rest else None
        rest.setdefault("causal", False)
        need(rest["head_dim"] in HEAD_DIMS, f"head size {rest['head_dim']}")
        longest = rest.get("max_token_per_sequence")
        need(longest in (None, int(qo.diff().max())), f"max_token_per_sequence {longest}")
        page, heads, kv_heads = rest["page_size"], rest["num_qo_heads"], rest["num_kv_heads"]
        for name, tensor in (("qo_indptr", qo), ("indptr", kv), ("last_page_len", last)):
            _check_ints(name, tensor)
            need(not isinstance(tensor, OnDevice), f"{name} would be copied back from the device")
            if name != "last_page_len":
                need(int(tensor[0]) == 0, f"{name} does not start at 0")
                need(bool((tensor.diff() >= 0).all()), f"{name} decreases")
        _check_ints("indices", indices)
        requests = len(last)
        need(0 < requests <= MAX_REQUESTS, f"{requests} requests")
        need(len(qo) == len(kv) == requests + 1, "indptr of another number of requests")
        need(len(indices) >= int(kv[-1]), f"{len(indices)} pages for an indptr to {int(kv[-1])}")
        pages = kv.diff()
        fits = torch.where(pages > 0, (last >= 1) & (last <= page), last == 0)
        need(bool(fits.all()), f"last_page_len {last.tolist()} for {pages.tolist()} pages")
        lens = (pages - 1).clamp(min=0) * page + last
        seq_lens = rest.get("seq_lens")
        if seq_lens is not None:
            need(not isinstance(seq_lens, OnDevice), "seq_lens would be copied back")
            need(torch.equal(seq_lens, lens), f"seq_lens {seq_lens.tolist()}, not {lens.tolist()}")
        need(heads % kv_heads == 0, f"{heads} heads over {kv_heads}")
        q_dtype, kv_dtype = rest.get("q_data_type"), rest.get("kv_data_type")
        need(q_dtype in (torch.float16, torch.bfloat16), f"query of {q_dtype}")
        need(rest.get("o_data_type") == q_dtype, "output of another type than the query")
        fp8 = (torch.float8_e4m3fn, torch.float8_e5m2)
        need(kv_dtype == q_dtype or kv_dtype in fp8, f"cache of {kv_dtype} for {q_dtype}")
        need(self.backend == "fa2" or kv_dtype == q_dtype, "fa3 takes no cache of another type")
        if not self.tensor_cores:
            need(heads // kv_heads in CUDA_CORE_GROUPS, f"group of {heads // kv_heads}")
        window, cap = rest.get("window_left", -1), rest.get("logits_soft_cap")
        need(window >= -1, f"window_left {window}")
        need(cap is None or cap > 0, f"logits_soft_cap {cap}")
        need(rest.get("sm_scale") is not None, "the softmax scale is left to FlashInfer")
        kept = {"qo": qo, "kv": kv, "indices": indices, "last": last}
        if self.is_graph:
            need(requests == len(self.buffers["last"]), "a graph's number of requests is fixed")
            self._max_total_num_rows = self._max_total_num_rows or int(qo[-1])
            need(int(qo[-1]) <= self._max_total_num_rows, "more rows than at the first plan")
            need(len(indices) <= len(self.buffers["indices"]), "more pages than reserved")
            for short, buffer in self.buffers.items():
                buffer[: len(kept[short])].copy_(kept[short])
            kept = {**kept, **self.buffers}
        else:
            kept = {short: tensor.clone() for short, tensor in kept.items()}
        self._qo_indptr_buf, self._paged_kv_indptr_buf = kept["qo"], kept["kv"]
        self._paged_kv_last_page_len_buf = kept["last"]
        self._paged_kv_indices_buf = kept["indices"]
        self.given = given
        kept = {name: tensor.as_subclass(Tensor) for name, tensor in kept.items()}
        self.planned = {**rest, **kept, "rows": int(qo[-1])}
        return self.planned

    def _plan_again(self, *args: Any) -> dict[str, Any]:
        """Plan by the module, which reads lengths on the host and cuts the rows' keys by them."""
        number = {(0, 6): 19, (0, 7): 20}[numbers_of(self.version)[:2]]
        number = number if self.backend == "fa2" else 16
        need(len(args) == number, f"{len(args)} arguments of {number}")
        need(args[0] is self._float_workspace_buffer, "another workspace")
        need(args[1] is self._int_workspace_buffer, "another workspace of lists")
        need(args[2] is self._pin_memory_int_workspace_buffer, "another pinned workspace")
        assert self.given is not None
        known = self.given
        qo, kv, lens, rows, requests, heads, kv_heads, page, graph, *rest = args[3:]
        need(requests == len(lens), f"{requests} requests")
        need(rows == (self._max_total_num_rows or int(qo[-1])), f"{rows} rows")
        need(heads == known["num_qo_heads"], f"{heads} heads")
        need(kv_heads == known["num_kv_heads"], f"{kv_heads} heads of keys")
        need(page == known["page_size"], f"pages of {page}")
        need(graph == self.is_graph, f"a graph: {graph}")
        size = known[self.names["head_dim"]]
        layer = [size, size, known.get("causal", False), known.get("window_left", -1)]
        need(rest[:4] == layer, f"layer {rest[:4]}, planned {layer}")
        need(rest[4:] in ([], [-1, False, 0], [-1, False, 0, 0]), f"options {rest[4:]}")
        pages = kv.diff()
        last = torch.where(pages > 0, lens - (pages - 1) * page, 0).int()
        on_gpu = (
            ("qo_indptr", qo, self._qo_indptr_buf),
            ("indptr", kv, self._paged_kv_indptr_buf),
            ("last_page_len", last, self._paged_kv_last_page_len_buf),
        )
        for name, host, device in on_gpu:
            same = torch.equal(host, device.as_subclass(Tensor))
            need(same, f"{name} is {device.as_subclass(Tensor).tolist()}, planned {host.tolist()}")
        names = self.names
        given = {
            **known,
            names["kv"]: kv,
            names["indices"]: self._paged_kv_indices_buf,
            names["last"]: last,
            "seq_lens": lens,
        }
        if "qo" in names:
            given |= {names["qo"]: qo, "max_token_per_sequence": int(qo.diff().max())}
        if self.mutation is not None:
            type(self).mutation("plan", given)  # type: ignore[misc]
        return self._keep(given)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        given = self._given("run", args, kwargs)
        plan = self.planned
        need(plan is not None, "run before plan")
        assert plan is not None
        query, out, lse = given["q"], given.get("out"), given.get("lse")
        key, value = given["paged_kv_cache"]
        self._check_run(plan, query, key, value, out, lse, given)
        scale = plan["sm_scale"]
        for name in ("q_scale", "k_scale", "v_scale"):
            number = given.get(name)
            need(number is None or isinstance(number, float), f"{name} is {type(number).__name__}")
        for name in ("q_scale", "k_scale"):
            scale *= 1.0 if given.get(name) is None else given[name]
        out[:], log2 = self._attend(plan, query, key, value, scale)
        if given.get("v_scale") is not None:
            out *= given["v_scale"]
        if given.get("return_lse"):
            lse[:] = log2
            return out, lse
        return out

    def _check_run(
        self, plan: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, given: Any
    ) -> None:
        heads, size = plan["num_qo_heads"], plan["head_dim"]
        need(query.shape == (plan["rows"], heads, size), f"query {[*query.shape]}")
        need(query.stride(-1) == 1, "query rows are strided")
        need(query.dtype == plan["q_data_type"], f"query of {query.dtype}")
        shape = (plan["page_size"], plan["num_kv_heads"], size)
        for name, rows in (("keys", key), ("values", value)):
            need(rows.shape[1:] == shape, f"{name} {[*rows.shape]}, planned {shape}")
            need(rows.dtype == plan["kv_data_type"], f"{name} of {rows.dtype}")
            need(rows.stride(-1) == 1, f"{name}' rows are strided")
        need(key.stride() == value.stride(), "keys and values of other strides")
        need(given.get("window_left") in (None, plan.get("window_left", -1)), "another window")
        need(out is not None, "output would be allocated")
        need(out.shape == query.shape and out.dtype == query.dtype, f"output {[*out.shape]}")
        need(out.is_contiguous(), "output is strided")
        need((lse is not None) == bool(given.get("return_lse")), "lse is given and not asked for")
        if lse is not None:
            need(lse.shape == query.shape[:2] and lse.dtype == torch.float32, f"lse of {lse.dtype}")
            need(lse.is_contiguous(), "lse is strided")

    def _attend(
        self, plan: Any, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        outs = torch.full(query.shape, float("nan"), dtype=torch.float64)
        log2 = torch.full(query.shape[:2], float("nan"))
        page = plan["page_size"]
        for row, (start, stop) in enumerate(pairwise(plan["qo"].tolist())):
            first, end = plan["kv"][row : row + 2].tolist()
            count = max(0, end - first - 1) * page + int(plan["last"][row])
            pages = plan["indices"][first:end].long()
            need(bool(((pages >= 0) & (pages < len(key))).all()), f"pages {pages.tolist()}")
            if stop == start or count == 0:
                continue
            rows = query[start:stop].double()
            k, v = (
                cache[pages]
                .flatten(0, 1)[:count]
                .double()
                .repeat_interleave(plan["num_qo_heads"] // plan["num_kv_heads"], 1)
                for cache in (key, value)
            )
            scores = torch.einsum("qhd,khd->hqk", rows, k) * scale
            if plan.get("logits_soft_cap"):
                scores = plan["logits_soft_cap"] * torch.tanh(scores / plan["logits_soft_cap"])
            back = (
                torch.arange(stop - start)[:, None] + count - (stop - start) - torch.arange(count)
            )
            visible = back >= 0 if plan["causal"] else torch.ones_like(back, dtype=torch.bool)
            if plan.get("window_left", -1) >= 0:
                visible &= back <= plan["window_left"]
            scores = scores.masked_fill(~visible, float("-inf"))
            outs[start:stop] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
            log2[start:stop] = (scores.logsumexp(-1).T / flashinfer_compat.LSE_UNIT).float()
        return outs, log2


class Prefill(_Wrapper):
    """Emulates ``BatchPrefillWithPagedKVCacheWrapper``."""

    name = PREFILL
    names = {  # noqa: RUF012
        "qo": "qo_indptr",
        "kv": "paged_kv_indptr",
        "indices": "paged_kv_indices",
        "last": "paged_kv_last_page_len",
        "head_dim": "head_dim_qk",
    }
    buffer_names = {  # noqa: RUF012
        "qo": "qo_indptr_buf",
        "kv": "paged_kv_indptr_buf",
        "indices": "paged_kv_indices_buf",
        "last": "paged_kv_last_page_len_buf",
    }


class Decode(_Wrapper):
    """Emulates ``BatchDecodeWithPagedKVCacheWrapper``."""

    name = DECODE
    names = {  # noqa: RUF012
        "kv": "indptr",
        "indices": "indices",
        "last": "last_page_len",
        "head_dim": "head_dim",
    }
    buffer_names = {  # noqa: RUF012
        "kv": "paged_kv_indptr_buffer",
        "indices": "paged_kv_indices_buffer",
        "last": "paged_kv_last_page_len_buffer",
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tensor_cores = self.use_tensor_cores = bool(kwargs.get("use_tensor_cores"))


def _check_ints(name: str, tensor: Tensor) -> None:
    need(tensor.dtype == torch.int32, f"{name} of {tensor.dtype}")
    need(tensor.dim() == 1 and tensor.is_contiguous(), f"{name} is not a contiguous row")


@contextmanager
def emulated(version: str = VERSIONS[0], mutation: Mutation | None = None) -> Iterator[FlashInfer]:
    """Put this module in FlashInfer's place; every call goes through ``mutation``."""
    shared = {"version": version, "mutation": None if mutation is None else staticmethod(mutation)}
    wrappers = (type(cls.__name__, (cls,), shared) for cls in (Prefill, Decode))
    found = FlashInfer(version, *wrappers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flashinfer_compat, "load", lambda: found)
        patch.setattr(flashinfer, "WORKSPACE_BYTES", WORKSPACE_BYTES)
        yield found
