"""When programs of the wide latent kernel and of its fold start, wait, and end, by the global timer.

    PYTHONPATH=<checkout> python trial/timeline.py [--compile]
"""
import importlib, os, re, sys, time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
ROWS = os.environ.get("ROWS", "mla_h128_b32_4k mla_h64_b64_8k mla_h16_q4_b64_4k mla_h16_q8_b32_4k mla_h128_b1_8k").split()
BASE = 1 << 17  # int64 numbers into the sums
STAMP = f'''

@gluon.jit
def stamp(sums_ptr, place):
    t = gl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=gl.int64, is_pure=False, pack=1)
    gl.store(sums_ptr.to(gl.pointer_type(gl.int64), bitcast=True) + {BASE} + place, t)


@gluon.jit
def stamp_sm(sums_ptr, place):
    t = gl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    gl.store(sums_ptr.to(gl.pointer_type(gl.int64), bitcast=True) + {BASE} + place, t.to(gl.int64))
'''
STAMP_AFTER = f'''

@triton.jit
def stamp_after(sums_ptr, place, x):
    """Stamp once x, an fp32 scalar, is there."""
    t = tl.inline_asm_elementwise("{{ .reg .pred p; setp.eq.u32 p, $1, 0x7f123456; @!p mov.u64 $0, %globaltimer; @p mov.u64 $0, 0; }}", "=l,r", [x.to(tl.int32, bitcast=True)], dtype=tl.int64, is_pure=False, pack=1)
    tl.store(sums_ptr.to(tl.pointer_type(tl.int64), bitcast=True) + {BASE} + place, t)
'''
TSTAMP = STAMP.replace("gluon.jit", "triton.jit").replace("gl.", "tl.") + STAMP_AFTER


def once(text, old, new):
    assert text.count(old) == 1, (text.count(old), old)
    return text.replace(old, new)


def write(name, text):
    path = os.path.join(HERE, name + ".py")
    if not os.path.exists(path) or open(path).read() != text:
        with open(f"{path}.{os.getpid()}", "w") as file:
            file.write(text)
        os.replace(file.name, path)
    return importlib.import_module(name)


def kernels():
    import attn.kernels.latent.hopper_wide as wide
    at = os.path.dirname(wide.__file__)
    text = open(os.path.join(at, "consumer.py")).read()
    text = once(text, "_TILE = tl.constexpr(128)", STAMP + "\n_TILE = tl.constexpr(128)")
    text = once(text, "            _load_queries(token, count, in_group, walks, query, room, tile, W)\n",
                "            _load_queries(token, count, in_group, walks, query, room, tile, W)\n            stamp(plan.sums_ptr, gl.program_id(0) * 16 + 2 + 8 * W)\n")
    text = once(text, "            state, walks = _with_all_sums(W, state, walks, room)\n",
                "            stamp(plan.sums_ptr, gl.program_id(0) * 16 + 3 + 8 * W)\n            state, walks = _with_all_sums(W, state, walks, room)\n")
    text = once(text, "        _write_part(W, cut, in_group, state, operands, room, plan, out, tile)\n",
                "        _write_part(W, cut, in_group, state, operands, room, plan, out, tile)\n        stamp(plan.sums_ptr, gl.program_id(0) * 16 + 4 + 8 * W)\n")
    write("tl_consumer", text)
    text = open(os.path.join(at, "kernel.py")).read()
    text = once(text, "from attn.kernels.latent.hopper_wide.consumer import consume_latents", "from tl_consumer import consume_latents, stamp, stamp_sm")
    text = once(text, "    wait_for_kernels_before()\n", "    stamp(sums_ptr, gl.program_id(0) * 16)\n    stamp_sm(sums_ptr, gl.program_id(0) * 16 + 5)\n    wait_for_kernels_before()\n    stamp(sums_ptr, gl.program_id(0) * 16 + 1)\n")
    main = write("tl_kernel", text).hopper_mla_kernel
    text = open(os.path.join(at, "fold.py")).read()
    text = once(text, "_FIELDS = tl.constexpr(ROW_FIELDS)\n", TSTAMP + "\n\n_FIELDS = tl.constexpr(ROW_FIELDS)\n")
    text = once(text, "    SLICES: tl.constexpr = (USED + _ROWS_OF_TWO - 1) // _ROWS_OF_TWO\n", "    SLICES: tl.constexpr = (USED + _ROWS_OF_TWO - 1) // _ROWS_OF_TWO\n    stamp(sums_ptr, 4096 + place * 8)\n")
    text = once(text, "    if WAITS:\n", "    stamp(sums_ptr, 4096 + place * 8 + 1)\n    if WAITS:\n")
    text = once(text, "            gdc_wait()\n", "            gdc_wait()\n    stamp(sums_ptr, 4096 + place * 8 + 2)\n")
    text = once(text, "        shrink = tl.exp2(m - base)\n", "        stamp_after(sums_ptr, 4096 + tl.program_id(0) * 8 + 4, tl.max(base + tl.zeros([1, 1], tl.float32)))\n        shrink = tl.exp2(m - base)\n")
    text = once(text, "        m = most\n", "        m = most\n        stamp_after(sums_ptr, 4096 + tl.program_id(0) * 8 + 5, tl.max(acc))\n")
    head, tail = text.split("@triton.jit(do_not_specialize=")
    head = head.rstrip() + "\n    stamp(sums_ptr, 4096 + place * 8 + 3)\n\n\n"
    fold = write("tl_fold", head + "@triton.jit(do_not_specialize=" + tail).fold_cuts_kernel
    return main, fold


def install():
    import attn.kernels.latent.hopper_wide.launch as launch
    import builders.splitkv.planner as planner
    from builders.buffers import GraphBuffers
    launch.hopper_mla_kernel, launch.fold_cuts_kernel = kernels()
    plain = GraphBuffers.declare

    def declare(self, name, shape, dtype, *more, **named):
        if name == "sums":
            shape = (max(shape[0], 2 * BASE) + (1 << 17),)
        return plain(self, name, shape, dtype, *more, **named)

    GraphBuffers.declare = declare


def row(torch, name, cases):
    from ring import member, plan_of
    from attn.bench.cases.inputs import expected_rows, make_content
    from attn.bench.measure.judge import output_of
    from attn.bench.measure.ours import make_builder, make_layer, our_run
    from specs.engine import DecodeKernel, Kernels, PrefillKernel
    case, device = cases[name], torch.device("cuda", 0)
    generator = torch.Generator().manual_seed(1)
    content = make_content(case, device, generator)
    layer = make_layer(member(), content, generator)
    builder = make_builder(member(), layer, kernels=Kernels.own(PrefillKernel.TRITON, DecodeKernel.HOPPER))
    run = our_run(layer, builder)
    run.call()
    if "--compile" in sys.argv:
        return
    plan = plan_of(builder.build(0, layer.batch))
    print(name, "error", f"{expected_rows(content).error_of(output_of(run)):.1e}", "programs", plan.groups * plan.heads, flush=True)
    stamps = plan.sums.view(torch.int64)[BASE : BASE + (1 << 16)]
    trash = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    for mode in ("flushed", "warm"):
        kept = []
        for _ in range(12):
            stamps.zero_()
            torch.cuda.synchronize()
            if mode == "flushed":
                trash.fill_(1)
                torch.cuda._sleep(200000)
                run.call()
            else:
                torch.cuda._sleep(400000)
                for _ in range(4):
                    run.call()
            torch.cuda.synchronize()
            kept.append(stamps.cpu().clone())
        rows = []
        for found in kept[2:]:
            main = found[: plan.groups * plan.heads * 16].view(-1, 16).double()
            fold = found[4096 :].view(-1, 8).double()
            fold = fold[fold[:, 0] > 0]
            t0 = main[:, 0].min()
            def q(x):
                x = x[x > 0] - t0
                return [float(x.min()), float(x.median()), float(x.max())] if len(x) else [float("nan")] * 3
            ends = torch.maximum(main[:, 3], main[:, 11])
            stored = torch.maximum(main[:, 4], main[:, 12])
            acts = fold[fold[:, 4] > 0]
            rows.append([q(main[:, 0]), q(main[:, 1]), q(main[:, 2]), q(ends), q(stored), q(fold[:, 0]), q(acts[:, 0]), q(acts[:, 1]), q(acts[:, 2]), q(acts[:, 4]), q(acts[:, 5]), q(acts[:, 3])])
            number = len(acts)
        middle = torch.tensor(rows, dtype=torch.float64).median(0).values / 1000
        names = ("start", "waited", "queries", "loop end", "stored", "fold start", "acts start", "acts planned", "acts waited", "acts lse", "acts outputs", "acts end")
        print(f"  {mode}, {number} act: us after the first start, least / median / most")
        for label, (a, b, c) in zip(names, middle.tolist()):
            print(f"    {label:13s} {a:7.2f} {b:7.2f} {c:7.2f}")
        sys.stdout.flush()


def main():
    install()
    from ring import prepare
    torch, cases = prepare()
    for name in ROWS:
        if name not in cases:
            continue
        with torch.inference_mode():
            row(torch, name, cases)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
