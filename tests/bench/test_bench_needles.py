"""The check before timing sees one wrong key: needles, and faults that it must find."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from attn.bench.cases import case as cases
from attn.bench.cases import inputs
from attn.bench.cases.case import CaseKind, KernelCase, make_case
from attn.bench.cases.dense import CASES, HOPPER_CASES
from attn.bench.cases.inputs import Content, expected_rows, make_content
from attn.bench.cases.latent import MLA_CASES
from attn.bench.cases.needles import (
    LONG_DRAWS,
    MOST_DRAWS,
    NEEDLE_LOGIT,
    ContentNeedles,
    _Tokens,
    num_draws,
)
from attn.bench.measure import ours
from attn.bench.measure.judge import check_run, needle_error
from attn.bench.measure.ours import make_builder, make_layer, our_run
from attn.bench.peers.dense import TOLERANCE, KernelRun
from attn.bench.results.results import Contender, Status
from attn.kernels.lang.numerics import INTERPRETED
from attn.registry import AttentionBackendEnum
from specs.dtypes import DType

CPU = torch.device("cpu")
HEADS = (4, 2, 64)
DECODE = make_case("decode", CaseKind.DECODE, HEADS, [(1, 1, 40), (1, 1, 150)])
VERIFY = make_case(
    "verify", CaseKind.VERIFY, HEADS, [(2, 4, 100)], num_speculative_tokens=3, sliding_window=33
)
PREFILL = make_case("prefill", CaseKind.PREFILL, HEADS, [(1, 70, 90)])
LATENT = make_case(
    *("latent", CaseKind.DECODE, (4, 1, 576), [(1, 1, 130), (1, 1, 64)]),
    rope_size=64,
    block_size=64,
)
ALL = (DECODE, VERIFY, PREFILL, LATENT)


def content_of(case: KernelCase) -> Content:
    return make_content(case, CPU, torch.Generator().manual_seed(0))


def attend(
    content: Content, output: torch.Tensor, lost: int | None = None, swapped: bool = False
) -> None:
    """Attention in fp32, without the key at a position or with two pages in each other's place."""
    case, cached, token = content.case, 0, 0
    group = case.num_heads // case.num_kv_heads
    for new, length in zip(case.query_lens, case.seq_lens, strict=True):
        slots = content.slots[cached : cached + length].clone()
        if swapped:
            page = case.block_size
            slots[: 2 * page] = torch.cat([slots[page : 2 * page], slots[:page]])
        key, value = (content.rows(side, slots).float() for side in (content.key, content.value))
        position = torch.arange(length)
        own = position[length - new :, None]
        window = case.sliding_window or length
        hidden = (position > own) | (position <= own - window)
        if lost is not None:
            hidden |= position == lost
        query = content.query[token : token + new].float().unflatten(1, (-1, group))
        scores = torch.einsum("qhgd,khd->hgqk", query, key) * case.scale
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        output[token : token + new] = torch.einsum("hgqk,khd->qhgd", weights, value).flatten(1, 2)
        token, cached = token + new, cached + length


def run_of(content: Content, **fault: Any) -> KernelRun:
    shape = (*content.query.shape[:2], content.case.head_size_v)
    output = content.query.new_empty(shape)
    return KernelRun(lambda: attend(content, output, **fault), output)


def outcome(content: Content, run: KernelRun) -> Contender | float:
    return check_run("one", run, expected_rows(content), ContentNeedles(content, 0))


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_a_right_kernel_passes_and_finds_its_own_queries_again(case: KernelCase) -> None:
    content = content_of(case)
    before = content.query.clone()
    found = outcome(content, run_of(content))
    assert isinstance(found, float), found
    assert torch.equal(content.query, before)
    if content.parts is not None:
        assert torch.equal(torch.cat(content.parts, -1), before)


@pytest.mark.parametrize("lost", [0, 1, 17, 38, 39])
def test_one_key_that_a_decode_drops_is_found(lost: int) -> None:
    content = content_of(DECODE)
    run = run_of(content, lost=lost)
    found = outcome(content, run)
    assert isinstance(found, Contender), found
    assert found.status is Status.WRONG
    assert needle_error(run, ContentNeedles(content, 1)) > TOLERANCE


def test_a_key_among_thousands_is_seen_by_needles_alone() -> None:
    case = make_case("long", CaseKind.DECODE, (8, 1, 64), [(1, 1, 30000)])
    content = content_of(case)
    lost = int(_Tokens.of(case, CPU, 0).places(case, 30)[0, 3])
    run = run_of(content, lost=lost)
    run.call()
    # Random keys hide it: the error is that of rounding.
    assert expected_rows(content).error_of(run.output) < TOLERANCE
    found = outcome(content, run)
    assert isinstance(found, Contender)
    assert "where a query looks for one key" in found.reason


@pytest.mark.parametrize("case", [DECODE, PREFILL, LATENT], ids=lambda case: case.name)
def test_two_pages_in_each_other_s_place_are_found_unless_both_are_seen(case: KernelCase) -> None:
    content = content_of(case)
    if case.kind is CaseKind.PREFILL:
        # A page that moves out of sight, or into it.
        assert isinstance(outcome(content, run_of(content, swapped=True)), Contender)
        return
    # The order of keys does not matter to a decode; a page of another request does.
    swapped = content.slots.clone()
    first, page = case.seq_lens[0], case.block_size
    swapped[:page] = content.slots[first : first + page]
    wrong = dataclasses.replace(content, slots=swapped)
    run = run_of(content)
    faulty = KernelRun(lambda: attend(wrong, run.output), run.output)
    assert isinstance(outcome(content, faulty), Contender)


@pytest.mark.parametrize("case", [DECODE, VERIFY, PREFILL], ids=lambda case: case.name)
def test_every_key_is_the_needle_of_some_head(case: KernelCase) -> None:
    tokens = _Tokens.of(case, CPU, 3)
    places = torch.stack([tokens.places(case, draw) for draw in range(num_draws(case))])
    assert bool((places >= tokens.first[:, None]).all())
    assert bool((places <= tokens.position[:, None]).all())
    for request, length in enumerate(case.seq_lens):
        own = tokens.request == request
        first = int(tokens.first[own].min())
        assert set(places[:, own].flatten().tolist()) == set(range(first, length))


def test_the_number_of_draws_follows_the_keys_and_the_heads() -> None:
    by_name = {case.name: case for case in (*CASES, *HOPPER_CASES, *MLA_CASES)}
    assert num_draws(by_name["dec_b1_8k"]) == 8192 // 32 + 1
    assert num_draws(by_name["dec_d64_sw128_sink"]) == 128 // 64 + 1
    assert num_draws(by_name["dec_b1_128k"]) == MOST_DRAWS
    assert num_draws(by_name["pre_1x8k"]) == LONG_DRAWS
    assert num_draws(by_name["mla_h16_b32_8k"]) == 8192 // 16 + 1 - 1 == MOST_DRAWS


def test_a_needle_has_the_logit_that_was_asked_for() -> None:
    content = content_of(DECODE)
    draw = next(ContentNeedles(content, 0).draws())
    key = content.rows(content.key, content.slots[39:40])[0].float()
    logit = (draw.query[0, 0].float() * key[0]).sum() * DECODE.scale
    assert float(logit) == pytest.approx(NEEDLE_LOGIT, rel=0.02)
    assert torch.equal(draw.values[0, 0], content.rows(content.value, content.slots[39:40])[0, 0])


def test_a_kernel_that_holds_its_queries_in_another_form_takes_them_anew() -> None:
    content = content_of(DECODE)
    held = content.query.clone()
    output = torch.empty_like(held)
    copied = dataclasses.replace(content, query=held)
    stale = KernelRun(lambda: attend(copied, output), output)
    assert isinstance(outcome(content, stale), Contender)
    fresh = dataclasses.replace(stale, refresh=lambda: held.copy_(content.query))
    assert isinstance(outcome(content, fresh), float)
    assert torch.equal(held, content.query)


def test_output_that_is_not_written_is_an_error() -> None:
    content = content_of(DECODE)
    output = torch.empty_like(content.query)
    assert not needle_error(KernelRun(lambda: None, output), ContentNeedles(content, 0)) < 1


# -- Our kernels, by Triton's interpreter.


@pytest.fixture
def in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use fp16, since Triton's interpreter multiplies the bit patterns of bf16."""
    if torch.cuda.is_available() or not INTERPRETED.value:
        pytest.skip("needs Triton's interpreter")
    for module in (cases, inputs, ours):
        monkeypatch.setattr(module, "MODEL_DTYPE", DType.FLOAT16)


@pytest.mark.usefixtures("in_halves")
@pytest.mark.parametrize("fault", [False, True])
def test_a_wrong_entry_of_our_block_table_is_found(fault: bool) -> None:
    case = make_case("decode", CaseKind.DECODE, HEADS, [(1, 1, 33), (1, 1, 50)])
    content, member = content_of(case), AttentionBackendEnum["TRITON_ATTN"]
    layer = make_layer(member, content, torch.Generator().manual_seed(0))
    run = our_run(layer, make_builder(member, layer))
    if fault:
        table = layer.batch.block_table_tensor
        table[0, 0] = table[1, 1]
    found = outcome(content, run)
    assert isinstance(found, Contender if fault else float), found


@pytest.mark.usefixtures("in_halves")
@pytest.mark.parametrize("fault", [False, True])
def test_a_wrong_entry_of_a_latent_block_table_is_found(fault: bool) -> None:
    case = LATENT.replace(seq_lens=(70, 66), num_heads=16)
    content, member = content_of(case), AttentionBackendEnum["TRITON_MLA"]
    layer = make_layer(member, content, torch.Generator().manual_seed(0))
    run = our_run(layer, make_builder(member, layer))
    if fault:
        table = layer.batch.block_table_tensor
        table[0, 1] = table[1, 0]
    found = outcome(content, run)
    assert isinstance(found, Contender if fault else float), found
