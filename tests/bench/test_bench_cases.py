"""The cases are the published ones, and name their targets."""

import pytest

from attn.bench.cases.case import PEERS, CaseKind, Target
from attn.bench.cases.dense import (
    CASES,
    FA4,
    HOPPER_CASES,
    HOPPER_PEERS,
    BenchTable,
    select_cases,
)
from specs.base import SpecError
from specs.dtypes import CacheDType

PUBLISHED = {
    "dec_b1_8k": [(0.02458, 1366), (0.0543, 618), (0.02541, 1321), (0.02294, 1463)],
    "dec_b1_128k": [(0.1484, 3617), (0.6519, 824), (0.1444, 3719), (0.1608, 3338)],
    "dec_b8_8k": [(0.08355, 3214), (0.1291, 2081)],
    "dec_b32_4k": [(0.1432, 3752), (0.2397, 2242), (0.1397, 3847), (0.1546, 3476)],
    "dec_b128_2k": [(0.2713, 3966), (0.2941, 3658)],
    "dec_b128_8k": [(0.9794, 4387), (1.121, 3834), (0.9909, 4337), (1.128, 3810)],
    "dec_b256_1k": [(0.2879, 3744), (0.3004, 3589)],
    "dec_b64_zipf": [(0.3596, 3695), (1.553, 856), (0.5171, 2570), (0.5091, 2610)],
    "dec_tp8_b32_8k": [(0.05219, 2574), (0.07571, 1774), (0.05274, 2548), (0.05133, 2617)],
    "dec_tp8_b128_4k": [(0.08515, 3159), (0.1356, 1984), (0.08438, 3187), (0.08534, 3151)],
    "dec_d64_b32_8k": [(0.1511, 3556), (0.361, 1489)],
    "dec_d64_sw128_sink": [(0.03462, 515), (0.0169, 1055)],
    "dec_d256_b32_8k": [(0.504, 4262), (0.6822, 3149)],
    "dec_mha_b32_4k": [(0.4988, 4306), (0.5692, 3774)],
    "dec_fp8_b128_8k": [(0.741, 2901), (1.36, 1581), (0.823, 2612), (0.5207, 4129)],
    "spec4_b32_8k": [(0.2633, 4085), (0.5208, 2066), (0.26, 4139)],
    "spec8_b8_32k": [(0.2678, 4013), (1.556, 691)],
    "pre_1x8k": [(0.9301, 591), (7.548, 73), (1.051, 523), (0.9622, 571)],
    "pre_16x1k": [(0.3322, 414), (2.061, 67), (0.3032, 454)],
    "pre_4x4k": [(0.9782, 562), (7.615, 72), (1.112, 495), (0.8993, 612)],
    "pre_1x32k": [(14.42, 610), (116.8, 75), (14.45, 609)],
    "chunk_2k_of_16k": [(0.8408, 613), (7.322, 70), (0.9508, 542)],
    "pre_d64_1x8k": [(1.16, 474), (9.206, 60), (1.208, 455)],
    "pre_d256_1x8k": [(0.8744, 629), (6.672, 82), (0.9066, 606)],
    "pre_sw1k_1x16k": [(0.6037, 441), (4.647, 57)],
    "mix_64dec8k_2kpre": [(1.081, 294), (4.87, 65)],
}
"""Milliseconds, and GB/s or TFLOP/s, that were published for a case, for any kernel."""

BY_NAME = {case.name: case for case in CASES}


def test_every_published_case_is_here_in_order():
    assert [case.name for case in CASES] == list(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_bytes_and_flops_are_the_published_ones(name):
    for milliseconds, rate in PUBLISHED[name]:
        # A figure is printed as an integer, so it is off by half of one at most.
        tolerance = 0.003 * rate + 0.5
        assert BY_NAME[name].rate(1000 * milliseconds) == pytest.approx(rate, abs=tolerance)


def test_ragged_lengths_are_always_the_same():
    lens = BY_NAME["dec_b64_zipf"].seq_lens
    assert (len(lens), min(lens), max(lens), sum(lens)) == (64, 144, 32239, 324190)
    assert lens[:4] == (2005, 9063, 209, 266)


def test_targets_are_those_asked_for():
    for case in CASES:
        if case.is_bandwidth_bound:
            assert case.target.max_ratio_to_best == 1.10
            assert case.target.faster_than == ("vllm_triton",)
    rates = {case.name: case.target.min_rate for case in CASES if case.target.min_rate}
    assert rates == {
        "dec_b128_8k": 4100,
        "dec_b64_zipf": 3600,
        "dec_fp8_b128_8k": 3300,
        "pre_1x8k": 375,
        "pre_d64_1x8k": 330,
        "pre_d256_1x8k": 360,
        "pre_sw1k_1x16k": 280,
    }
    mixed = BY_NAME["mix_64dec8k_2kpre"].target
    assert [(bound.peer, bound.max_ratio) for bound in mixed.max_ratios] == [("fa3", 1.25)]
    assert BY_NAME["pre_16x1k"].target == Target()
    named = {name for case in CASES for name in case.target.faster_than}
    assert named | {bound.peer for bound in mixed.max_ratios} <= set(PEERS)


def test_variants_are_compared_where_asked_for():
    free = [case.name for case in CASES if case.compare_free_partition]
    assert free == ["dec_b1_8k", "dec_b32_4k", "dec_b128_8k", "dec_b64_zipf", "dec_tp8_b32_8k"]
    invariant = [case.name for case in CASES if case.compare_batch_invariant]
    assert invariant == ["pre_1x8k", "chunk_2k_of_16k"]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("dec_b64_zipf", "decode 32/8/128, 64 ragged of 144..32239"),
        ("dec_d64_sw128_sink", "decode 64/8/64, 64 x 8192, window 128, sinks"),
        ("dec_fp8_b128_8k", "decode 32/8/128, 128 x 8192, fp8_e4m3 KV"),
        ("spec4_b32_8k", "verify 32/8/128, 32 x 4 of 8192"),
        ("pre_1x8k", "prefill 32/8/128, 1 x 8192"),
        ("mix_64dec8k_2kpre", "mixed 32/8/128, 64 x 8192, 1 x 2048 of 10240"),
    ],
)
def test_what_a_case_is_in_words(name, what):
    assert BY_NAME[name].what == what


def test_live_keys_end_at_the_window_of_the_first_new_token():
    verify = BY_NAME["spec4_b32_8k"].replace(query_lens=(4,), seq_lens=(100,), sliding_window=10)
    rows = 4 * 32 * 128 * 2
    assert verify.nbytes == 13 * 8 * 128 * 2 * 2 + 2 * rows
    wide = verify.replace(sliding_window=200)
    assert wide.nbytes == 100 * 8 * 128 * 2 * 2 + 2 * rows
    assert verify.replace(kv_cache_dtype=CacheDType.FP8_E4M3).nbytes == 13 * 8 * 256 + 2 * rows


@pytest.mark.parametrize("window", [None, 1, 7, 40, 41, 1000])
def test_flops_count_each_visible_pair(window):
    case = BY_NAME["chunk_2k_of_16k"].replace(
        query_lens=(9, 5), seq_lens=(40, 5), sliding_window=window
    )
    pairs = 0
    for query_len, seq_len in ((9, 40), (5, 5)):
        for position in range(seq_len - query_len, seq_len):
            pairs += min(position + 1, window or position + 1)
    assert case.flops == 4 * 128 * 32 * pairs


def test_patterns_choose_cases():
    assert select_cases([]) == CASES
    assert [case.name for case in select_cases(["pre_sw*", "spec?_*", "spec4*"])] == [
        "spec4_b32_8k",
        "spec8_b8_32k",
        "pre_sw1k_1x16k",
    ]
    with pytest.raises(ValueError, match=r"case must match one of dec_b1_8k.*; got 'mla_\*'"):
        select_cases(["dec_*", "mla_*"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_lens": (1, 1)}, "one entry per request, got 2 and 1"),
        ({"query_lens": (2,)}, r"query_lens of a decode must be 1, got \{2\}"),
        ({"kind": CaseKind.VERIFY, "num_speculative_tokens": 3}, "verify must be 4"),
        ({"kind": CaseKind.PREFILL, "query_lens": (9000,)}, "at most seq_lens, got 9000, 8192"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(SpecError, match=message):
        BY_NAME["dec_b1_8k"].replace(**changes)


# -- The Hopper table.

HOPPER = {case.name: case for case in HOPPER_CASES}
RAGGED = [name for name in HOPPER if name.startswith("rag")]


def test_the_hopper_table_holds_every_dense_case_and_more():
    assert BenchTable.HOPPER.cases is HOPPER_CASES
    assert BenchTable.HOPPER.peers == (*HOPPER_PEERS, FA4)
    assert (BenchTable.DENSE.cases, BenchTable.DENSE.peers) == (CASES, PEERS)
    more = ["rag6_d128", "rag48_d128", "rag6_d64", "rag48_d64"]
    more += ["dec_p32_b32_4k", "dec_p64_b32_4k", "dec_p128_b32_4k"]
    more += ["dec_h12_b32_4k", "dec_h24_b32_4k", "dec_h96_b32_4k"]
    more += ["spec4_b128_2k", "spec8_b32_4k", "dec_d192_b32_8k", "pre_d80_1x8k", "dec_b1_1m"]
    more += ["pre_fp8_1x8k", "chunk_fp8_2k_of_16k"]
    assert list(HOPPER) == [*PUBLISHED, *more]
    for name in PUBLISHED:
        dense = {**BY_NAME[name].model_dump(), "target": None}
        ours = {**HOPPER[name].model_dump(), "target": None}
        unlike = {field for field in dense if dense[field] != ours[field]}
        assert unlike <= {"compare_free_partition", "compare_batch_invariant"}


def test_targets_of_the_hopper_table_are_level_with_the_best():
    for name, case in HOPPER.items():
        target = case.target
        if "fp8" in name and not case.is_bandwidth_bound:
            assert target == Target(no_slower_than=name.replace("fp8_", ""))
            continue
        odd = case.head_size not in (64, 128, 256)
        assert target.against == (("fa3",) if odd else HOPPER_PEERS)
        assert target.max_ratio_to_best == 1.0
    assert [name for name, case in HOPPER.items() if case.target.max_host_us] == ["pre_1x8k"]


@pytest.mark.parametrize("name", RAGGED)
def test_ragged_batches_span_what_was_asked_for(name):
    case = HOPPER[name]
    count = int(name.removeprefix("rag").split("_")[0])
    assert case.num_reqs == count
    assert min(case.query_lens) <= 4
    assert 1500 <= max(case.query_lens) <= 4000
    contexts = [b - a for a, b in zip(case.query_lens, case.seq_lens, strict=True)]
    assert sum(context > 0 for context in contexts) == count // 2
    assert all(context == 0 or 64 <= context < 8192 for context in contexts)
    assert case.query_lens == HOPPER[f"rag{count}_d64"].query_lens
    assert f"{min(case.query_lens)}..{max(case.query_lens)} new" in case.what
    # About a quarter of the requests are served as short queries.
    assert 0 < sum(length <= 16 for length in case.query_lens) < count / 2


def test_the_hopper_table_has_the_shapes_that_users_run():
    decodes = [case for case in HOPPER_CASES if case.is_bandwidth_bound]
    assert {case.block_size for case in decodes} == {16, 32, 64, 128}
    assert {case.num_heads for case in decodes} >= {12, 24, 96}
    assert {case.num_speculative_tokens for case in decodes} == {0, 3, 7}
    assert max(case.seq_lens[0] for case in decodes) == 1048576
    assert {case.head_size for case in HOPPER_CASES} == {64, 80, 128, 192, 256}
