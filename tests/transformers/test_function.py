"""The attention function against float64, and the faults that these tests must see."""

import contextlib
import dataclasses

import pytest
import torch

from attn.integrations.transformers import attention, compat, layers, register, steps
from tests.transformers.attention_calls import BUDGET, TRIALS
from tests.transformers.model_runs import continuously, expected, prompts
from tests.transformers.small_models import make_model

BY_NAME = {trial.name: trial for trial in TRIALS}


@pytest.fixture
def poisoned_scratch(monkeypatch):
    """What a call finds in the pages that it writes to is NaN."""
    scratch = layers.Group.scratch

    def poisoned(group, pages):
        key, value = scratch(group, pages)
        return key.fill_(float("nan")), value.fill_(float("nan"))

    monkeypatch.setattr(layers.Group, "scratch", poisoned)


@pytest.mark.parametrize("trial", TRIALS, ids=BY_NAME)
def test_a_call_is_attention_by_definition(trial, poisoned_scratch):
    assert trial.error() < BUDGET


@pytest.mark.parametrize(
    "name", ["chunk", "sinks_window", "soft_cap", "other_value_size", "encoder_window", "cross"]
)
def test_a_call_by_the_kernels_of_a_gpu(name, poisoned_scratch):
    register("TRITON_ATTN")
    assert BY_NAME[name].error() < BUDGET


def test_rows_of_padding_are_zero():
    trial = BY_NAME["prefill"]
    assert not trial.run()[0, : 30 - 9].any()


# -- Seeded faults: each makes a trial, or the tokens of a continuous batch, wrong.


def drop(name):
    """The layer's scores without one of their parts."""

    def seed(monkeypatch):
        scores = attention.Scores

        def without(*args):
            return dataclasses.replace(scores(*args), **{name: None})

        monkeypatch.setattr(attention, "Scores", without)

    return seed


def wrong_kind(**changes):
    def seed(monkeypatch):
        kind = attention.LayerKind

        def wrong(**fields):
            changed = {name: change(fields[name]) for name, change in changes.items()}
            return kind(**{**fields, **changed})

        monkeypatch.setattr(attention, "LayerKind", wrong)

    return seed


def wrong_scale(monkeypatch):
    scores = attention.Scores
    monkeypatch.setattr(attention, "Scores", lambda scale, *rest: scores(scale * 1.1, *rest))


def no_mask(monkeypatch):
    rectangle = attention._rectangle
    monkeypatch.setattr(
        attention, "_rectangle", lambda call, mask, causal: rectangle(call, None, causal)
    )


def never_causal(monkeypatch):
    rectangle = attention._rectangle
    monkeypatch.setattr(
        attention, "_rectangle", lambda call, mask, causal: rectangle(call, mask, False)
    )


def wrong_batch(**changes):
    """A step's batch with other tensors."""

    def seed(monkeypatch):
        batch = steps._batch

        def wrong(*args):
            right = batch(*args)
            changed = {name: change(getattr(right, name)) for name, change in changes.items()}
            return right.replace(**changed)

        monkeypatch.setattr(steps, "_batch", wrong)

    return seed


CALL_FAULTS = {
    "sinks dropped": ("sinks", drop("sinks")),
    "soft cap dropped": ("soft_cap", drop("soft_cap")),
    "scale": ("decode", wrong_scale),
    "window one wider": ("window", wrong_kind(window=lambda window: window + 1)),
    "window one narrower": ("decode_window", wrong_kind(window=lambda window: window - 1)),
    "padding attended": ("decode", no_mask),
    "not causal": ("prefill", never_causal),
    "one key too few": ("chunk", wrong_batch(seq_lens=lambda lens: lens - 1)),
    "keys at the wrong places": ("decode", wrong_batch(slot_mapping=lambda slots: slots.roll(1))),
}


@pytest.mark.parametrize("fault", CALL_FAULTS)
def test_a_fault_in_a_call_is_seen(fault, monkeypatch):
    name, seed = CALL_FAULTS[fault]
    assert BY_NAME[name].error() < BUDGET
    seed(monkeypatch)
    # Another layer: impls and plans of the first are kept.
    assert not dataclasses.replace(BY_NAME[name]).error() < 100 * BUDGET


def never_planned_anew(monkeypatch):
    """A group stays in its first step for ever."""
    step = layers.Group.step

    def first(group, token, layer, make):
        kept = getattr(group, "first", None)
        if kept is None:
            kept = group.first = step(group, token, layer, make)
        return kept

    monkeypatch.setattr(layers.Group, "step", first)


def wrong_packed(**changes):
    """A packed step with other fields."""

    def seed(monkeypatch):
        packed_step = compat.packed_step

        def wrong(*args):
            step, key, value = packed_step(*args)
            if step is not None:
                present = {
                    name: change(getattr(step, name))
                    for name, change in changes.items()
                    if getattr(step, name) is not None
                }
                step = dataclasses.replace(step, **present)
            return step, key, value

        monkeypatch.setattr(attention.compat, "packed_step", wrong)

    return seed


PACKED_FAULTS = {
    "a plan of an earlier step": never_planned_anew,
    "pages of other requests": wrong_packed(all_slots=lambda slots: slots.flip(0)),
    "block table of other requests": wrong_packed(block_table=lambda table: table.flip(0)),
    "new keys not written": wrong_packed(slots=lambda slots: torch.full_like(slots, -1)),
    "queries of other requests": wrong_packed(
        query_start_loc=lambda starts: (starts[-1] - starts).flip(0)
    ),
    "values in the pages of keys": wrong_packed(pages=lambda pages: (pages[0], pages[0])),
}


@pytest.mark.parametrize("fault", PACKED_FAULTS)
def test_a_fault_in_a_continuous_batch_is_seen(fault, monkeypatch, block_tables):
    PACKED_FAULTS[fault](monkeypatch)
    model = make_model("llama")
    model.set_attn_implementation("attn")
    found = None
    # A fault may end the batch with an error.
    with contextlib.suppress(RuntimeError):
        found = continuously(model, prompts())
    assert found != expected("llama")
