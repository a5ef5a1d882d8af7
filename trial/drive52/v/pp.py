import sys
p='attn/kernels/dense/hopper_prefill/segmented.py'
s=open(p).read()
s=s.replace('''@gluon.jit
def _step(''','''@gluon.jit
def _in_turn(PART: gl.constexpr, place):
    if PART == 0:
        place = gl.inline_asm_elementwise("bar.sync 14, 256; mov.b32 $0, $1;", "=r,r", [place], dtype=gl.int32, is_pure=False, pack=1)
    else:
        place = gl.inline_asm_elementwise("bar.sync 15, 256; mov.b32 $0, $1;", "=r,r", [place], dtype=gl.int32, is_pure=False, pack=1)
    return place


@gluon.jit
def _passed_on(PART: gl.constexpr, place):
    if PART == 0:
        place = gl.inline_asm_elementwise("bar.arrive 15, 256; mov.b32 $0, $1;", "=r,r", [place], dtype=gl.int32, is_pure=False, pack=1)
    else:
        place = gl.inline_asm_elementwise("bar.arrive 14, 256; mov.b32 $0, $1;", "=r,r", [place], dtype=gl.int32, is_pure=False, pack=1)
    return place


@gluon.jit
def _step(''',1)
i=s.index('def _step(')
h,t=s[:i],s[i:]
if 'ppbase' in sys.argv:
    t=t.replace('''    rings.keys.wait_full(now)
    scores = scores_of(place, now, queries, rings.keys, shape)
    rings.values.wait_full(before)
    acc, rest = output_of(left, before, acc, rest, rings.values)
''','''    rings.keys.wait_full(now)
    place = _in_turn(PART, place)
    scores = scores_of(place, now, queries, rings.keys, shape)
    rings.values.wait_full(before)
    acc, rest = output_of(left, before, acc, rest, rings.values)
    _passed_on(PART, place)
''',1)
else:
    t=t.replace('''        rings.keys.wait_full(now)
        scores = scores_of(place, now, queries, rings.keys, shape)
        rings.values.wait_full(before)
        acc, rest = output_of(weights, before, acc, rest, rings.values)
    else:''','''        rings.keys.wait_full(now)
        place = _in_turn(PART, place)
        scores = scores_of(place, now, queries, rings.keys, shape)
        rings.values.wait_full(before)
        acc, rest = output_of(weights, before, acc, rest, rings.values)
        _passed_on(PART, place)
    else:''',1)
t=t.replace('''    mbarrier.wait(queries.full.index(0), 0)
    tile = part_told(PART, 0, queries, shape)
''','''    mbarrier.wait(queries.full.index(0), 0)
    tile = part_told(PART, 0, queries, shape)
    if PART == 1:
        _passed_on(PART, turn)
''',1)
open(p,'w').write(h+t)
