p='attn/kernels/dense/hopper_prefill/launch.py'; s=open(p).read()
s=s.replace('"HELD": _is_held(tile),','"HELD": int(_is_held(tile)) ^ TRIAL,')
s=s.replace('_ROWS = ("k_desc"','TRIAL = 0\n_ROWS = ("k_desc"',1)
open(p,'w').write(s)
p='attn/kernels/dense/hopper_prefill/segmented.py'; s=open(p).read()
s=s.replace("if shape.HELD:","if shape.HELD % 2 == 1:"); open(p,'w').write(s)
p='attn/kernels/dense/hopper_prefill/consumer.py'; s=open(p).read()
def once(a,b):
    global s
    assert s.count(a)==1,(s.count(a),a); s=s.replace(a,b)
once("if shape.HELD:","if shape.HELD % 2 == 1:")
once("    FIRST: gl.constexpr = False,\n","    FIRST: gl.constexpr = False, LAZY: gl.constexpr = False,\n")
a=s.index("    if MASKED:\n        scores = masked_tile"); b=s.index("    return weights, top, sums, shrink\n")
plain=s[a:b]
s=s[:a]+'''    if LAZY:
        if MASKED:
            scores = masked_tile(scores, first_key, rows, kv_len, mask)
        top = referred(largest_of_own(scores), m, factor)
        base = top
        if MASKED:
            base = gl.where(top == float("-inf"), 0.0, top)
        weights = gl.exp2(scores * factor - spread(base, scores))
        sums = sum_of_own(weights)
        shrink = gl.exp2(m - base)
        if not FIRST:
            sums = gl.fma(l, shrink, sums)
    else:
'''+''.join('    '+x+'\n' if x else '\n' for x in plain.split('\n')[:-1])+s[b:]
once("rows, tile.kv_len, scaling, mask, MASKED\n    )","rows, tile.kv_len, scaling, mask, MASKED,\n        False, shape.HELD >= 2\n    )")
once('''    acc = scaled(acc, shrink)
    if rings.values.EXTRA > 0:
        rest = scaled(rest, shrink)
    return acc, rest, pack''','''    if shape.HELD >= 2:
        acc = rescaled(acc, spread(shrink, acc))
        if rings.values.EXTRA > 0:
            rest = rescaled(rest, spread(shrink, rest))
    else:
        acc = scaled(acc, shrink)
        if rings.values.EXTRA > 0:
            rest = scaled(rest, shrink)
    return acc, rest, pack''')
once("    part_told,\n","    part_told,\n    largest_of_own,\n    referred,\n    spread,\n    rescaled,\n")
once('''    SUMS: gl.constexpr = m.type.layout
    row =''','''    if shape.HELD >= 2:
        m = gl.convert_layout(gl.max(m, 1), gl.SliceLayout(1, shape.SCORES))
    SUMS: gl.constexpr = m.type.layout
    row =''')
once('''    if not scaling.SOFT_CAP:
        m = m * scaling.factor
''','''    if not scaling.SOFT_CAP and shape.HELD < 2:
        m = m * scaling.factor
''')
once('''    m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, shape.SCORES))
''','''    if shape.HELD >= 2:
        m = gl.full([64, 4], float("-inf"), gl.float32, largest_of_own(scores).type.layout)
    else:
        m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, shape.SCORES))
''')
once("scaling, mask, True, True\n","scaling, mask, True, True, shape.HELD >= 2\n")
open(p,'w').write(s)
