"""The exchange between four threads that lets each write sixteen bytes at a time."""

from __future__ import annotations

import numpy as np

from attn.kernels.dense.hopper_prefill import vector_store as quads

LANES = 32
WORDS = 8


def run_by_lanes(text: str, given: np.ndarray) -> np.ndarray:
    """Run PTX on the words ``[LANES, WORDS]`` of a warp's lanes, instruction by instruction."""
    lanes = np.arange(LANES)
    registers = {f"${WORDS + i}": given[:, i] for i in range(WORDS)}
    for line in text.strip("{ }").split(";"):
        name, *places = line.replace(",", " ").split() or [""]
        into, *others = places or [""]
        if name == "mov.u32":
            assert others == ["%laneid"]
            registers[into] = lanes
        elif name == "mov.b32":
            registers[into] = registers[others[0]]
        elif name == "and.b32":
            registers[into] = registers[others[0]] & int(others[1])
        elif name == "setp.ne.u32":
            registers[into] = registers[others[0]] != int(others[1])
        elif name == "selp.b32":
            first, second, which = (registers[place] for place in others)
            registers[into] = np.where(which, first, second)
        elif name == "shfl.sync.bfly.b32":
            assert others[2:] == ["31", "-1"]
            registers[into] = registers[others[0]][lanes ^ int(others[1])]
        else:
            assert name in ("", ".reg"), name
    return np.stack([registers[f"${i}"] for i in range(WORDS)], 1)


def test_each_of_four_lanes_gets_a_run() -> None:
    """Before the exchange, lane t has word t of every run; after it, lane t has the whole run t.

    A lane has words of two rows, which alternate.
    """
    lane, word, row = np.meshgrid(np.arange(LANES), np.arange(4), np.arange(2), indexing="ij")
    quad, within = lane // 4, lane % 4
    # Each word's value is its name: quad, row, run, and place in the run.
    had = ((quad * 2 + row) * 4 + word) * 4 + within
    gets = ((quad * 2 + row) * 4 + within) * 4 + word
    found = run_by_lanes(quads._QUADS.value, had.reshape(LANES, WORDS))
    np.testing.assert_array_equal(found, gets.reshape(LANES, WORDS))
