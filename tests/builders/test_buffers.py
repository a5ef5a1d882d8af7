"""Persistent buffers keep their address and never grow."""

import pytest
import torch

from builders.buffers import GraphBuffers


@pytest.fixture
def buffers() -> GraphBuffers:
    """Two buffers: lengths for eight requests, a table of eight rows."""
    made = GraphBuffers("cpu")
    made.declare("seq_lens", (8,), torch.int32)
    made.declare("block_table", (8, 4), torch.int32, fill=-1)
    return made


def test_a_buffer_is_filled_when_declared(buffers: GraphBuffers) -> None:
    assert buffers["seq_lens"].tolist() == [0] * 8
    assert buffers["block_table"].eq(-1).all()
    assert buffers["block_table"].dtype == torch.int32
    assert buffers.device == torch.device("cpu")


def test_writing_keeps_the_address_and_leaves_the_rest_alone(buffers: GraphBuffers) -> None:
    address = buffers["block_table"].data_ptr()
    for rows, columns in [(8, 4), (3, 2), (1, 4)]:
        source = torch.randint(0, 99, (rows, columns), dtype=torch.int32)
        before = buffers["block_table"].clone()
        view = buffers.write("block_table", source)
        before[:rows, :columns] = source
        assert view.data_ptr() == buffers["block_table"].data_ptr() == address
        assert torch.equal(view, source)
        assert torch.equal(buffers["block_table"], before)
        assert view.data_ptr() != source.data_ptr()


def test_a_view_is_the_leading_part_and_shares_memory(buffers: GraphBuffers) -> None:
    view = buffers.view("block_table", 2, 3)
    view.fill_(7)
    assert view.shape == (2, 3)
    assert buffers["block_table"][:2, :3].eq(7).all()
    assert int(buffers["block_table"].eq(7).sum()) == 6
    assert buffers.view("seq_lens", 0).shape == (0,)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("seq_lens", (9,)), ("block_table", (8, 5)), ("block_table", (9, 4)), ("block_table", (8,))],
)
def test_more_than_was_declared_is_refused(
    buffers: GraphBuffers, name: str, shape: tuple[int, ...]
) -> None:
    address = buffers[name].data_ptr()
    with pytest.raises(ValueError, match=f"graph buffer '{name}' was declared .* asked for"):
        buffers.view(name, *shape)
    with pytest.raises(ValueError, match=f"graph buffer '{name}' was declared .* asked for"):
        buffers.write(name, torch.zeros(shape, dtype=torch.int32))
    assert buffers[name].data_ptr() == address


def test_a_name_is_declared_once(buffers: GraphBuffers) -> None:
    with pytest.raises(ValueError, match="graph buffer 'seq_lens' is declared already"):
        buffers.declare("seq_lens", (16,), torch.int32)
    assert buffers["seq_lens"].shape == (8,)


def test_writing_converts_to_the_declared_dtype(buffers: GraphBuffers) -> None:
    view = buffers.write("seq_lens", torch.tensor([1, 2], dtype=torch.int64))
    assert (view.dtype, view.tolist()) == (torch.int32, [1, 2])


def test_bytes_are_those_of_all_buffers(buffers: GraphBuffers) -> None:
    assert buffers.nbytes == (8 + 8 * 4) * 4
    assert GraphBuffers("cpu").nbytes == 0
