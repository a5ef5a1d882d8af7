"""Every pair of kernels over every layout in every mode: a plan, or a refusal with known words.

The table is written by hand, from the kernels' sources and threads; nothing of it is computed.
"""

from __future__ import annotations

import sys
from dataclasses import FrozenInstanceError, replace
from itertools import product
from pathlib import Path
from typing import Final

import pytest

from builders.sparse.choice import (
    BatchStats,
    PhasePlan,
    SparseSetup,
    check_setup,
    find_module,
    nearest_kernel,
    reachable_plans,
    resolve,
    unavailable_kernels,
)
from specs.base import SpecError
from specs.devices import KNOWN_DEVICES
from specs.dtypes import DType
from specs.rows import LatentFormat
from specs.sparse_mla import (
    SPARSE_KERNELS,
    STORED_FORMATS,
    ForwardMode,
    IndexKind,
    KernelVariant,
    SparseKernel,
    SparseKernelRule,
    SparsePhase,
    rule_of,
)

BF16, RAW, SCALED = STORED_FORMATS
K, MODES = SparseKernel, ForwardMode
PREFILL, DECODE = SparsePhase.PREFILL, SparsePhase.DECODE
DEVICES = ("h200", "b200")

# What a kernel is given ("as it is", or the rows it converts to), or the words of its refusal.
AS_IT_IS, TO_656, TO_BF16 = "as it is", "to 656", "to bf16"
NOT_FOR_DECODE = "rows are converted to bf16 for prefill, not for decode"
LOSES = "bf16 rope would be rounded to e4m3"
NO_SCALE = "one scale per tensor is chosen when rows are written"
ONLY_BF16 = "fa3 reads bf16 rows alone"
SM100_ONLY = "trtllm needs compute capability 10.0 to 10.3, got 9.0"
SM90_ONLY = "needs compute capability 9.0, got 10.0"

# Rows of a cache -> kernel -> (prefill, decode), on an H200, and where a B200 differs.
TABLE: Final = {
    BF16: {
        K.TRITON_SPARSE: (AS_IT_IS, AS_IT_IS),
        K.FLASHMLA_SPARSE: (AS_IT_IS, AS_IT_IS),
        K.FLASHMLA_KV: (TO_656, TO_656),
        K.FLASHMLA_AUTO: (AS_IT_IS, AS_IT_IS),
        K.TRTLLM: (SM100_ONLY, SM100_ONLY),
        K.FLASHINFER_MLA: (NO_SCALE, NO_SCALE),
        K.FA3: (AS_IT_IS, AS_IT_IS),
    },
    RAW: {
        K.TRITON_SPARSE: (AS_IT_IS, AS_IT_IS),
        K.FLASHMLA_SPARSE: (TO_BF16, NOT_FOR_DECODE),
        K.FLASHMLA_KV: (TO_656, TO_656),
        K.FLASHMLA_AUTO: (TO_656, TO_656),
        K.TRTLLM: (SM100_ONLY, SM100_ONLY),
        K.FLASHINFER_MLA: (AS_IT_IS, AS_IT_IS),
        K.FA3: (ONLY_BF16, ONLY_BF16),
    },
    SCALED: {
        K.TRITON_SPARSE: (AS_IT_IS, AS_IT_IS),
        K.FLASHMLA_SPARSE: (TO_BF16, NOT_FOR_DECODE),
        K.FLASHMLA_KV: (AS_IT_IS, AS_IT_IS),
        K.FLASHMLA_AUTO: (AS_IT_IS, AS_IT_IS),
        K.TRTLLM: (LOSES, LOSES),
        K.FLASHINFER_MLA: (LOSES, LOSES),
        K.FA3: (ONLY_BF16, ONLY_BF16),
    },
}
ON_B200: Final = {
    (BF16, K.TRTLLM): (AS_IT_IS, AS_IT_IS),
    (BF16, K.FA3): (SM90_ONLY, SM90_ONLY),
    # FLASHMLA_AUTO takes, of FlashMLA's two kernels, the kernel for few keys per new token.
    (RAW, K.FLASHMLA_AUTO): (TO_BF16, TO_656),
    (RAW, K.TRTLLM): (AS_IT_IS, AS_IT_IS),
    (RAW, K.FLASHINFER_MLA): (SM90_ONLY, SM90_ONLY),
    (SCALED, K.FLASHMLA_AUTO): (TO_BF16, AS_IT_IS),
}
# The kernel that "flashmla_auto" stands for: (prefill, decode).
AUTO: Final = {
    ("h200", BF16): (K.FLASHMLA_SPARSE, K.FLASHMLA_SPARSE),
    ("h200", RAW): (K.FLASHMLA_KV, K.FLASHMLA_KV),
    ("h200", SCALED): (K.FLASHMLA_KV, K.FLASHMLA_KV),
    ("b200", BF16): (K.FLASHMLA_SPARSE, K.FLASHMLA_SPARSE),
    ("b200", RAW): (K.FLASHMLA_SPARSE, K.FLASHMLA_KV),
    ("b200", SCALED): (K.FLASHMLA_SPARSE, K.FLASHMLA_KV),
}
# Number of heads that 16 are padded to: (H200, B200).
HEADS: Final = {
    K.TRITON_SPARSE: (16, 16),
    K.FLASHMLA_SPARSE: (64, 128),
    K.FLASHMLA_KV: (64, 64),
    K.TRTLLM: (None, 16),
    K.FLASHINFER_MLA: (16, None),
    K.FA3: (16, None),
}
# Phases that have rows: (prefill, decode).
PHASES: Final = {
    MODES.EXTEND: (True, False),
    MODES.DECODE: (False, True),
    MODES.MIXED: (True, True),
    MODES.TARGET_VERIFY: (False, True),
    MODES.DRAFT_EXTEND: (False, True),
    MODES.IDLE: (False, False),
}
NEW = BatchStats(prefill_tokens=100, prefill_keys=5000)


def setup_of(
    layout: LatentFormat = BF16,
    prefill: SparseKernel = K.TRITON_SPARSE,
    decode: SparseKernel = K.TRITON_SPARSE,
    device: str = "h200",
    **fields: object,
) -> SparseSetup:
    made = SparseSetup(
        layout=layout,
        prefill=prefill,
        decode=decode,
        num_heads=16,
        topk=2048,
        block_size=64,
        dtype=DType.BFLOAT16,
        capability=KNOWN_DEVICES[device].compute_capability,
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def expected(device: str, layout: LatentFormat, kernel: SparseKernel) -> tuple[str, str]:
    given = TABLE[layout][kernel]
    return ON_B200.get((layout, kernel), given) if device == "b200" else given


def holds(plan: PhasePlan, device: str, chosen: SparseKernel, given: str) -> None:
    """Check that the plan is the table's."""
    is_prefill = plan.phase is PREFILL
    wanted = chosen
    if chosen is K.FLASHMLA_AUTO:
        wanted = AUTO[device, plan.stored][0 if is_prefill else 1]
    assert plan.kernel is wanted
    assert plan.reads is {AS_IT_IS: plan.stored, TO_656: SCALED, TO_BF16: BF16}[given]
    if given == AS_IT_IS:
        assert plan.conversion is None
        assert plan.index_kind is IndexKind.PAGED
    else:
        assert plan.conversion is not None
        assert (plan.conversion.source, plan.conversion.target) == (plan.stored, plan.reads)
        # 100 new tokens list more rows than exist, decodes list fewer.
        assert plan.index_kind is (IndexKind.RAGGED if is_prefill else IndexKind.GATHERED)
    assert plan.padded_heads == HEADS[wanted][DEVICES.index(device)]
    assert plan.num_heads == 16
    # Only a vendor's kernel that reads one scale per tensor has the query in e4m3.
    is_fp8 = wanted is K.TRTLLM and plan.stored is RAW
    assert plan.query_dtype is (DType.FLOAT8_E4M3FN if is_fp8 else DType.BFLOAT16)
    assert plan.snaps_scales == (given == TO_656 and wanted is K.FLASHMLA_KV and device == "b200")
    assert plan.skips_minus_one == (wanted not in (K.FLASHINFER_MLA, K.FA3, K.TRTLLM))
    assert plan.index_width == plan.topk == 2048


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", STORED_FORMATS)
@pytest.mark.parametrize(("prefill", "decode"), list(product(K, K)))
def test_every_combination_has_a_plan_or_the_refusal_of_the_table(
    prefill: SparseKernel, decode: SparseKernel, layout: LatentFormat, device: str
) -> None:
    setup = setup_of(layout, prefill, decode, device)
    given = expected(device, layout, prefill)[0], expected(device, layout, decode)[1]
    works = [text in (AS_IT_IS, TO_656, TO_BF16) for text in given]
    if not all(works):
        with pytest.raises(ValueError, match="SPARSE_MLA cannot be set up so") as refusal:
            check_setup(setup, {})
        said = str(refusal.value)
        for phase, text, good in zip(("prefill", "decode"), given, works, strict=True):
            assert good == (f"\n{phase} by " not in said)
            assert good or text in said
        assert said.count(": use ") == works.count(False)
        return
    check_setup(setup, {})
    for mode in MODES:
        plan = resolve(setup, mode, NEW)
        assert plan.mode is mode
        has_prefill, has_decode = PHASES[mode]
        assert (plan.prefill is not None, plan.decode is not None) == (has_prefill, has_decode)
        if plan.prefill is not None:
            holds(plan.prefill, device, prefill, given[0])
        if plan.decode is not None:
            holds(plan.decode, device, decode, given[1])


def test_the_table_names_every_kernel_and_every_layout() -> None:
    assert set(TABLE) == set(STORED_FORMATS)
    for by_kernel in TABLE.values():
        assert set(by_kernel) == set(K)
    assert {rule.kernel for rule in SPARSE_KERNELS} == set(K) - {K.FLASHMLA_AUTO} == set(HEADS)


# -- Sequences that went wrong in other libraries.


@pytest.mark.parametrize("layout", [RAW, SCALED])
def test_a_decode_between_two_prefills_changes_neither(layout: LatentFormat) -> None:
    """Elsewhere a decode overwrote prefill's kernel. The kind of the indices then followed
    prefill's kernel in every mode, while offsets existed for prefill alone.
    """
    setup = setup_of(layout, prefill=K.FLASHMLA_SPARSE, decode=K.FLASHMLA_KV)
    check_setup(setup, {})
    first = resolve(setup, MODES.EXTEND, NEW)
    step = resolve(setup, MODES.DECODE)
    again = resolve(setup, MODES.EXTEND, NEW)
    assert first == again
    for plan in (first, again):
        assert plan.prefill is not None
        assert plan.prefill.kernel is K.FLASHMLA_SPARSE
        assert plan.prefill.index_kind is IndexKind.RAGGED
        assert plan.prefill.reads is BF16
    assert step.prefill is None
    assert step.decode is not None
    assert step.decode.kernel is K.FLASHMLA_KV
    assert step.decode.index_kind is not IndexKind.RAGGED
    # The bf16 kernel's rows are converted in a batch with decodes too; elsewhere they were handed
    # over as they were.
    mixed = resolve(setup, MODES.MIXED, NEW)
    assert mixed.prefill == first.prefill
    assert mixed.decode == step.decode


def test_plans_and_setups_cannot_be_written() -> None:
    setup = setup_of()
    plan = resolve(setup, MODES.MIXED)
    assert plan.decode is not None
    for record, name in ((setup, "prefill"), (plan, "mode"), (plan.decode, "kernel")):
        with pytest.raises(FrozenInstanceError):
            setattr(record, name, None)


@pytest.mark.parametrize("layout", [RAW, SCALED])
def test_auto_takes_the_bf16_kernel_for_few_keys_per_token_on_a_b200_alone(
    layout: LatentFormat,
) -> None:
    for device, keys, kernel in (
        ("b200", 511, K.FLASHMLA_SPARSE),
        ("b200", 512, K.FLASHMLA_KV),
        ("h200", 1, K.FLASHMLA_KV),
    ):
        setup = setup_of(layout, K.FLASHMLA_AUTO, K.FLASHMLA_AUTO, device)
        plan = resolve(setup, MODES.EXTEND, BatchStats(1, keys)).prefill
        assert plan is not None
        assert plan.kernel is kernel
    kernels = {plan.kernel for plan in reachable_plans(setup_of(layout, K.FLASHMLA_AUTO), PREFILL)}
    assert kernels == {K.FLASHMLA_KV}
    on_b200 = setup_of(layout, K.FLASHMLA_AUTO, device="b200")
    assert {plan.kernel for plan in reachable_plans(on_b200, PREFILL)} == {
        K.FLASHMLA_SPARSE,
        K.FLASHMLA_KV,
    }


@pytest.mark.parametrize(
    ("stats", "kind"),
    [
        (BatchStats(2, 4096), IndexKind.RAGGED),
        (BatchStats(2, 4097), IndexKind.GATHERED),
        (BatchStats(), IndexKind.RAGGED),
    ],
)
def test_the_fewer_rows_are_converted(stats: BatchStats, kind: IndexKind) -> None:
    plan = resolve(setup_of(RAW, K.FLASHMLA_SPARSE), MODES.EXTEND, stats).prefill
    assert plan is not None
    assert plan.index_kind is kind


# -- Heads, lists, types, and what is there.


@pytest.mark.parametrize(
    ("kernel", "layout", "device", "padded"),
    [
        (K.TRITON_SPARSE, BF16, "h200", {1: 1, 20: 20, 128: 128}),
        (K.FLASHMLA_SPARSE, BF16, "h200", {1: 64, 64: 64, 65: 128, 128: 128}),
        (K.FLASHMLA_SPARSE, BF16, "b200", {8: 128, 64: 128}),
        (K.FLASHMLA_KV, SCALED, "b200", {8: 64, 96: 128}),
        (K.TRTLLM, BF16, "b200", {1: 1, 20: 20, 64: 64, 65: 128, 128: 128}),
        (K.FLASHINFER_MLA, RAW, "h200", {1: 1, 20: 32, 128: 128}),
        (K.FA3, BF16, "h200", {20: 20}),
    ],
)
def test_heads_are_padded_to_what_a_kernel_takes(
    kernel: SparseKernel, layout: LatentFormat, device: str, padded: dict[int, int]
) -> None:
    for heads, wanted in padded.items():
        setup = setup_of(layout, kernel, kernel, device, num_heads=heads)
        check_setup(setup, {})
        plan = resolve(setup, MODES.DECODE).decode
        assert plan is not None
        assert (plan.num_heads, plan.padded_heads) == (heads, wanted)


@pytest.mark.parametrize(
    ("kernel", "layout", "device", "widths"),
    [
        (K.TRITON_SPARSE, BF16, "h200", {1: 1, 2047: 2047}),
        (K.FLASHMLA_SPARSE, BF16, "h200", {1: 128, 2048: 2048, 2049: 2176}),
        (K.FLASHMLA_KV, SCALED, "h200", {1: 64, 2049: 2112}),
        (K.TRTLLM, RAW, "b200", {1: 4, 2047: 2048}),
        (K.FA3, BF16, "h200", {7: 7}),
    ],
)
def test_lists_are_padded_to_what_a_kernel_takes(
    kernel: SparseKernel, layout: LatentFormat, device: str, widths: dict[int, int]
) -> None:
    for topk, width in widths.items():
        plan = resolve(setup_of(layout, kernel, kernel, device, topk=topk), MODES.DECODE).decode
        assert plan is not None
        assert (plan.topk, plan.index_width) == (topk, width)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 0}, "num_heads must be 1 to 128, got 0"),
        ({"num_heads": 129}, "num_heads must be 1 to 128, got 129"),
        ({"topk": 0}, "topk must be positive, got 0"),
        ({"layout": LatentFormat.INDEXER_FP8}, "layout must be one of .*, got indexer_fp8"),
        ({"dtype": DType.FLOAT64}, "triton_sparse takes a model dtype of .*, got float64"),
        (
            {"prefill": K.FLASHMLA_SPARSE, "dtype": DType.FLOAT16},
            "flashmla_sparse takes a model dtype of bfloat16, got float16: use triton_sparse",
        ),
        (
            {"layout": SCALED, "decode": K.FLASHMLA_KV, "block_size": 128},
            "flashmla_kv reads blocks of 64 tokens, got block_size 128: use triton_sparse",
        ),
        (
            {"prefill": K.FLASHMLA_SPARSE, "has_padded_pages": True},
            "flashmla_sparse reads a cache as one array of rows, got pages with padding: "
            "use flashmla_kv",
        ),
        (
            {"layout": RAW, "decode": K.FLASHINFER_MLA, "has_padded_pages": True},
            "flashinfer_mla reads a cache as one array of rows, got pages with padding: "
            "use flashmla_kv",
        ),
        (
            {"capability": None, "decode": K.FLASHMLA_KV},
            "flashmla_kv needs compute capability 9.0 or 10.0 to 10.3, got a device without any: "
            "use triton_sparse",
        ),
    ],
)
def test_a_setup_that_cannot_work_is_refused_with_the_way_out(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_setup(replace(setup_of(), **fields), {})  # type: ignore[arg-type]


def test_blocks_of_any_size_go_where_rows_are_converted() -> None:
    setup = setup_of(RAW, K.FLASHMLA_KV, K.FLASHMLA_KV, block_size=16, has_padded_pages=True)
    check_setup(setup, {})
    check_setup(replace(setup, prefill=K.FLASHMLA_SPARSE), {})


def test_the_nearest_choice_reads_rows_as_they_are_if_one_does() -> None:
    setup = setup_of(BF16)
    assert nearest_kernel(K.TRTLLM, setup, DECODE, {}) is K.FLASHMLA_SPARSE
    assert nearest_kernel(K.TRTLLM, setup_of(SCALED), DECODE, {}) is K.FLASHMLA_KV
    assert nearest_kernel(K.FLASHINFER_MLA, setup_of(RAW, device="b200"), DECODE, {}) is K.TRTLLM
    gone = dict.fromkeys(set(K) - {K.TRITON_SPARSE}, "is gone")
    assert nearest_kernel(K.TRTLLM, setup, DECODE, gone) is K.TRITON_SPARSE
    assert nearest_kernel(K.TRTLLM, setup, DECODE, gone | {K.TRITON_SPARSE: "too"}) is None
    with pytest.raises(ValueError, match="too: no other kernel works"):
        check_setup(setup, {K.TRITON_SPARSE: "too", **gone})


def test_a_kernel_that_cannot_be_imported_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("builders.sparse.choice.find_module", lambda name: name == "triton")
    missing = unavailable_kernels()
    assert set(missing) == set(HEADS) - {K.TRITON_SPARSE}
    assert missing[K.FLASHMLA_KV] == (
        "flashmla_kv is not available: no flash_mla or "
        "vllm.third_party.flashmla.flash_mla_interface is installed"
    )
    for chosen in (K.FLASHMLA_KV, K.FLASHMLA_AUTO):
        with pytest.raises(ValueError, match=r"no flash_mla or .* is installed: use triton_sparse"):
            check_setup(setup_of(SCALED, decode=chosen))
    check_setup(setup_of(SCALED))


def test_a_kernel_that_is_there_and_not_called_is_no_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("builders.sparse.choice.find_module", lambda name: True)
    assert unavailable_kernels() == {}
    monkeypatch.setattr("builders.sparse.choice.CALLED", (K.TRITON_SPARSE,))
    assert set(unavailable_kernels()) == set(HEADS) - {K.TRITON_SPARSE}
    with pytest.raises(ValueError, match="fa3 is installed, but not called by SPARSE_MLA yet"):
        check_setup(setup_of(decode=K.FA3))
    check_setup(setup_of())


def test_modules_are_found_without_importing_their_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "found_nowhere_else"
    (package / "inner" / "deep").mkdir(parents=True)
    for folder in (package, package / "inner"):
        (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "inner" / "deep" / "__init__.py").write_text("")
    (package / "_extension.abi3.so").write_bytes(b"")
    (package / "inner" / "interface.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("", ".inner", ".inner.deep", ".inner.interface", "._extension"):
        assert find_module(f"found_nowhere_else{name}")
    for name in (".other", ".inner.other", "._extension.inner", ".other.interface"):
        assert not find_module(f"found_nowhere_else{name}")
    assert not find_module("found_really_nowhere.at_all")
    assert "found_nowhere_else" not in sys.modules


def test_resolving_what_does_not_run_says_what_must_come_first() -> None:
    setup = setup_of(decode=K.TRTLLM)
    with pytest.raises(ValueError, match="check_setup must come before resolve: trtllm"):
        resolve(setup, MODES.DECODE)


# -- Rules.


def test_rules_that_contradict_themselves_are_refused() -> None:
    fields = {
        "kernel": K.TRTLLM,
        "modules": ("a",),
        "variants": (KernelVariant(capabilities=None),),
    }
    with pytest.raises(SpecError, match="bf16 is read as it is by trtllm"):
        SparseKernelRule(**fields, reads=(BF16,), decode_converts=(BF16,))
    with pytest.raises(SpecError, match="bf16 rope would be rounded"):
        SparseKernelRule(**fields, reads=(RAW,), prefill_converts=(SCALED,))


def test_rules_are_data() -> None:
    for rule in SPARSE_KERNELS:
        assert rule_of(rule.kernel) is rule
        assert SparseKernelRule.model_validate_json(rule.model_dump_json()) == rule
    with pytest.raises(ValueError, match="stands for flashmla_sparse or flashmla_kv"):
        rule_of(K.FLASHMLA_AUTO)
