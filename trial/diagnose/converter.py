import pathlib, subprocess
base=pathlib.Path('CHECKOUT'); T=base/'trial'
L='attn/kernels/latent/hopper_wide/'
conv=(base/L/'converter.py').read_text(); kern=(base/L/'kernel.py').read_text(); cons=(base/L/'consumer.py').read_text(); fold=(base/L/'fold.py').read_text()
def sub(s, *pairs):
    for a,b in pairs:
        assert s.count(a)==1, (s.count(a), a)
        s=s.replace(a,b)
    return s
def imp(name, k=kern): return sub(k, ("from attn.kernels.latent.hopper_wide.converter import", f"from conv_{name} import"))
def put(name, c, k=None):
    (T/f'conv_{name}.py').write_text(c); (T/f'k_{name}.py').write_text(imp(name, k or kern))
put('nosts', sub(conv, ("    mine.slice(COLUMN, pairs.shape[1], dim=1).store(pairs)\n", "    if COLUMN == 0:\n        mine.slice(COLUMN, pairs.shape[1], dim=1).store(pairs)\n")))
put('nofence', sub(conv, ("    fence_async_shared()\n    mbarrier.arrive","    mbarrier.arrive")))
put('hot', sub(conv, ("even = _piece(starts, pages, 2)","even = _piece(starts, pages, 0)"),("odd = _piece(starts, pages, 3)","odd = _piece(starts, pages, 0)"),("            odd = _piece(starts, pages, 1)\n            turn","            odd = _piece(starts, pages, 0)\n            turn"),("            starts = _starts(pages, key, cache)\n            rotary","            rotary")))
# quarter hand-over
cq=sub(conv, ("            _put(even, left.index(block), W, 0)\n","            _put(even, left.index(block), W, 0)\n            _hand_over(ring, 6 + block)\n"),("            _put(even, right.index(block), W, 0)\n","            _put(even, right.index(block), W, 0)\n            _hand_over(ring, 8 + block)\n"))
kq=sub(kern, ("from attn.kernels.latent.hopper_wide.consumer import","from cons_quart import"),
 ("    full = gl.allocate_shared_memory(gl.int64, [6, 1], BARRIER)\n","    full = gl.allocate_shared_memory(gl.int64, [10, 1], BARRIER)\n"),
 ("        mbarrier.init(full.index(i), count=CONVERTERS if E4M3 else 1)\n        mbarrier.init(empty","        mbarrier.init(empty"),
 ("    for i in gl.static_range(4):\n        mbarrier.init(ready","    for i in gl.static_range(10):\n        mbarrier.init(full.index(i), count=CONVERTERS)\n    for i in gl.static_range(4):\n        mbarrier.init(ready"))
put('quart', cq, kq)
(T/'cons_quart.py').write_text(open('CHECKOUT/trial/cons_quart.py').read())
# one part ahead: parts of both blocks in another order? late rope
prev=subprocess.run(['git','-C','CHECKOUT','show','HEAD~1:'+L+'converter.py'],capture_output=True,text=True).stdout
pk=subprocess.run(['git','-C','CHECKOUT','show','HEAD~1:'+L+'kernel.py'],capture_output=True,text=True).stdout
(T/'conv_prev.py').write_text(prev); (T/'k_prev.py').write_text(imp('prev', pk))
# folds
(T/'fold_e.py').write_text(sub(fold, ("USED, GROUPS, 64, _WIDTH // 8,","USED, GROUPS, 64, _WIDTH // 8,")))
f32=fold[:fold.index("        elif parts <= 32:")]+fold[fold.index("        elif unit < 8 * USED:"):]
f32=f32.replace("elif unit < 8 * USED:","elif unit < 4 * USED:").replace("GROUPS, 64, _WIDTH // 8,","GROUPS, 32, _WIDTH // 4,").replace("_MOST_AT_ONCE = tl.constexpr(64)","_MOST_AT_ONCE = tl.constexpr(32)")
(T/'fold_32.py').write_text(f32)
fw=sub(fold, ("        unit = (c - first) * SLICES + place % SLICES\n","        unit = (c - first) * SLICES + place % SLICES\n        spread = place % SLICES * (parts - 1) + (c - first)\n"), ("        elif unit < 8 * USED:\n            _fold_many(\n                unit,","        elif spread < 8 * USED:\n            _fold_many(\n                spread,"))
(T/'fold_spread.py').write_text(fw)
p=T/'fp8wide.py'; s=p.read_text()
a=s.index('V = {"narrow"'); b=s.index("ROWS = [")
s=s[:a]+'''V = {"narrow": dict(invariant=True), "wide": {}} | {name: dict(layout="k_" + name) for name in ("hot", "nosts", "nofence", "prev", "quart")}
'''+s[b:]
a=s.index("ROWS = ["); b=s.index("WARM = [")
s=s[:a]+'''ROWS = [
    ("odd_h128", "wide quart"), ("odd_h64", "wide quart"), ("odd_p16_h20", "wide quart"), ("odd_h16q4", "wide quart"),
    ("h128_b32_4k", "wide prev hot nosts nofence quart flashmla"),
    ("h128_b128_4k", "wide prev hot nosts nofence quart flashmla"),
    ("h64_b64_8k", "wide prev quart flashmla"),
    ("h16q4_b64_4k", "wide prev quart flashmla"),
    ("h128_b1_8k", "wide prev quart flashmla"),
    ("h128_zipf", "wide prev quart flashmla"),
]
'''+s[b:]
p.write_text(s)
p=T/'foldtrial.py'; s=p.read_text()
a=s.index('V = {"base"'); b=s.index("ROWS = [")
s=s[:a]+'''V = {"base": dict(fold="old_fold"), "new": {}, "f32": dict(fold="fold_32"), "spread": dict(fold="fold_spread")}
'''+s[b:]
a=s.index('ROWS = ['); b=s.index("# The last field")
s=s[:a]+'''ROWS = [(name, "base new f32 spread") for name in ("odd_h128", "mla_h128_b1_8k", "h64_b1_8k", "mla_h128_b32_4k", "h128_b4_32k", "mla_h128_b1_1m")]
'''+s[b:]
s=s.replace('for case in (_latent("h128_b4_32k", 128, (4, 32768)),','for case in (_latent("h128_b4_32k", 128, (4, 32768)), _latent("h64_b1_8k", 64, (1, 8192)),')
s=s.replace('if name == "old_fold":','if name in ("old_fold", "fold_32", "fold_spread"):')
p.write_text(s)
