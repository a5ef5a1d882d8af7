"""Seeded faults: each makes a step wrong, and the tests' measure must see it."""

import contextlib
import dataclasses

import pytest
import torch

from attn.integrations.sglang import backend, dense, steps
from builders.pages import slot_tables
from tests.sglang.slot_engine import BUDGET, Engine, LayerSpec
from tests.sglang.test_sglang_dense import APART, served

LAYERS = [LayerSpec(sinks=True, cap=4.0), LayerSpec(window=20)]
DRAFTS = {"speculative_num_draft_tokens": 3, "speculative_algorithm": "EAGLE"}


def wrong_kind(**changes):
    def seed(monkeypatch):
        kind = dense.LayerKind

        def wrong(**fields):
            return kind(**{**fields, **{name: f(fields[name]) for name, f in changes.items()}})

        monkeypatch.setattr(dense, "LayerKind", wrong)

    return seed


def after_fill(change):
    """The tables and lengths of a step, changed after they were written."""

    def seed(monkeypatch):
        fill = slot_tables.SlotTables.fill

        def wrong(tables, step):
            fill(tables, step)
            change(tables, len(step.rows))

        monkeypatch.setattr(slot_tables.SlotTables, "fill", wrong)

    return seed


def one_key_too_few(tables, reqs):
    tables.kv_lens[:reqs] -= 1


def pages_of_others(tables, reqs):
    tables.table[:reqs] = tables.table[:reqs].flip(0)


def queries_of_others(tables, reqs):
    starts = tables.starts[: reqs + 1]
    tables.starts[: reqs + 1] = (starts[-1] - starts).flip(0)


def drafts_not_counted(monkeypatch):
    lengths_of = steps.lengths_of
    monkeypatch.setattr(
        steps, "lengths_of", lambda *args: dataclasses.replace(lengths_of(*args), added=0)
    )


def no_window_table(monkeypatch):
    make_step = backend.make_step

    def wrong(*args):
        step = make_step(*args)
        table = step.full.block_table_tensor
        step.window = step.window.replace(block_table_tensor=table)
        return step

    monkeypatch.setattr(backend, "make_step", wrong)


def window_slots_not_translated(monkeypatch):
    monkeypatch.setattr(steps.Step, "new_slots", lambda step, slots, in_window: slots)


def no_sinks(monkeypatch):
    new_layer = dense.DenseBackend._new_layer
    monkeypatch.setattr(
        dense.DenseBackend,
        "_new_layer",
        lambda own, layer, sinks, *rest: new_layer(own, layer, None, *rest),
    )


def impl_without(place, value):
    def seed(monkeypatch):
        with_two_pools = dense._with_two_pools

        def wrong():
            def make(*args, **kwargs):
                changed = [*args]
                changed[place] = value
                return with_two_pools()(*changed, **kwargs)

            return make

        monkeypatch.setattr(dense, "_with_two_pools", wrong)

    return seed


def values_from_keys(monkeypatch):
    pages_of = dense.pages_of
    first = {}

    def wrong(rows, page_size):
        return first.setdefault(len(first) // 2, pages_of(rows, page_size))

    monkeypatch.setattr(dense, "pages_of", wrong)


def a_plan_of_an_earlier_step(monkeypatch):
    record, kept = dense.DenseBackend._record, {}

    def wrong(own, step, kind):
        if kind not in kept:
            kept[kind] = record(own, step, kind)
        return kept[kind]

    monkeypatch.setattr(dense.DenseBackend, "_record", wrong)


def no_scales(monkeypatch):
    monkeypatch.setattr(
        dense, "scales_of", lambda layer, device: dense.LayerScales.of(device=device)
    )


def nothing_written(monkeypatch):
    monkeypatch.setattr(
        steps.Step, "new_slots", lambda step, slots, in_window: torch.full_like(slots, -1)
    )


ONE = {"layers": LAYERS, **DRAFTS}
TWO = {"layers": APART, "windows_apart": True, **DRAFTS}
FP8 = {"layers": [LayerSpec(scales=(0.3, 1.7))], "cache": torch.float8_e4m3fn, **DRAFTS}
FAULTS = {
    "window one wider": (ONE, wrong_kind(window=lambda window: window and window + 1)),
    "window as SGLang counts it": (ONE, wrong_kind(window=lambda window: window and window - 1)),
    "one key too few": (ONE, after_fill(one_key_too_few)),
    "pages of other requests": (ONE, after_fill(pages_of_others)),
    "queries of other requests": (ONE, after_fill(queries_of_others)),
    "drafts not counted": (ONE, drafts_not_counted),
    "window layers read the full pool's pages": (TWO, no_window_table),
    "window layers write the full pool's slots": (TWO, window_slots_not_translated),
    "sinks dropped": (ONE, no_sinks),
    "soft cap dropped": (ONE, impl_without(7, None)),
    "values read from keys": (ONE, values_from_keys),
    "a plan of an earlier step": (ONE, a_plan_of_an_earlier_step),
    "scales dropped": (FP8, no_scales),
    "new keys not written": (ONE, nothing_written),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault, monkeypatch):
    arguments, seed = FAULTS[fault]
    seed(monkeypatch)
    engine = Engine(arguments["layers"], **{k: v for k, v in arguments.items() if k != "layers"})
    with contextlib.suppress(IndexError, ValueError):
        assert any(not error < 100 * BUDGET for error in served(engine))
