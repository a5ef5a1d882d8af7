import sys
def edit(p, pairs):
    s=open(p).read()
    for a,b in pairs:
        assert s.count(a)==1,(p,a,s.count(a))
        s=s.replace(a,b)
    open(p,'w').write(s)
edit('attn/kernels/latent/hopper_narrow/finish.py',[
('''    PIECES: gl.constexpr = tile.SIZE // _PIECE
    seen = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
    is_last = seen % _CLAIM == count
    is_complete = is_last
    looks = gl.where(waits, _LOOKS + 0, 0)
    while (looks > 0) & (is_complete == 0):
        is_complete = gl.atomic_add(counter, 0, sem="acquire", scope="gpu") % _CLAIM == count
        looks -= 1
    if is_complete:
        # Piece 0 is for the last to come, who does not have to claim it.
        piece = 0
        if not is_last:
            seen = _added(counter, _CLAIM)
            piece = _claims(seen)
        while piece < PIECES:
            _fold_piece(piece, slot, count, work, head, plan, out, tile)
            seen = _added(counter, _CLAIM)
            piece = _claims(seen)
    else:
        seen = _added(counter, _LEAVE)
    # A program leaves with a claim past the last piece, or else with _LEAVE.
    if _claims(seen) - (PIECES - 1) + seen // _LEAVE == count:
        gl.store(counter, 0)
''','''    PIECES: gl.constexpr = tile.SIZE // _PIECE
    seen = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
    is_complete = seen % _CLAIM == count
    # Every program begins with no piece. It folds one state, writes nothing, and has the
    # instructions then, which come from memory: their 4 us would follow the last arrival.
    piece = -1
    goes_on = waits | is_complete
    while goes_on:
        _fold_piece(piece, slot, count, work, head, plan, out, tile)
        looks = gl.where(waits & (piece < 0), _LOOKS + 0, 0)
        while (looks > 0) & (is_complete == 0):
            is_complete = gl.atomic_add(counter, 0, sem="acquire", scope="gpu") % _CLAIM == count
            looks -= 1
        goes_on = is_complete
        if is_complete:
            seen = _added(counter, _CLAIM)
            piece = _claims(seen) - 1
            goes_on = piece < PIECES
    if not is_complete:
        seen = _added(counter, _LEAVE)
    # A program leaves with a claim past the last piece, or else with _LEAVE.
    if gl.maximum(_claims(seen) - PIECES, 0) + seen // _LEAVE == count:
        gl.store(counter, 0)
'''),
('''    """Fold a piece of the columns of ``count`` states in neighbouring slots, and write it."""
    # With a constant zero Triton 3.9 spills the thread's number, and others.
    cells, column = _cells(piece * _PIECE, tile, _PIECE, opaque_zero())
    state = _empty_state(cells)
    for part in range(0, count, 16):''','''    """Fold a piece of the columns of ``count`` states in neighbouring slots, and write it.

    Piece -1 is one state, and is not written.
    """
    # With a constant zero Triton 3.9 spills the thread's number, and others.
    cells, column = _cells(gl.maximum(piece, 0) * _PIECE, tile, _PIECE, opaque_zero())
    state = _empty_state(cells)
    is_real = piece >= 0
    count = gl.where(is_real, count, 1)
    for part in range(0, count, 16):'''),
('''    _store_or_write(state, cells, column, slot, False, work, head, plan, out, tile)


@gluon.jit
def _fold_in_pieces''','''    _store_or_write(state, cells, column, slot, False, work, head, plan, out, tile, is_real)


@gluon.jit
def _fold_in_pieces'''),
('''def _store_or_write(state, cells, column, target, stores, work, head, plan, out, tile):
''','''def _store_or_write(
    state, cells, column, target, stores, work, head, plan, out, tile, is_real=True
):  # fmt: skip
'''),
('''        wanted = (row < count * tile.TILE_HEADS) & (in_tile < tile.GROUP)
''','''        wanted = (row < count * tile.TILE_HEADS) & (in_tile < tile.GROUP) & is_real
'''),
])
