import sys
src,dst=sys.argv[1:3]; s=open(src).read()
def r(a,b,n=1):
    global s
    assert s.count(a)==n,(s.count(a),a); s=s.replace(a,b)
r('''    weights = scores
    if segments.STORED:
        # Behind''','''    pairs = left
    if segments.STORED:
        # Behind''')
r('''        l = _with_sums(l, shrink, _sums_of(weights, segments.SUMS))
    acc, rest = awaited''','''        l = _with_sums(l, shrink, _sums_of(weights, segments.SUMS))
        pairs = pack(weights, shape.VALUE, shape.KV_TILE)
    acc, rest = awaited''')
r('''        l = _with_sums(l, shrink, _sums_of(weights, segments.SUMS))
    return opens, acc, rest, pack(weights, shape.VALUE, shape.KV_TILE), top, l, folded
''','''        l = _with_sums(l, shrink, _sums_of(weights, segments.SUMS))
        pairs = pack(weights, shape.VALUE, shape.KV_TILE)
    return opens, acc, rest, pairs, top, l, folded
''')
open(dst,'w').write(s)
