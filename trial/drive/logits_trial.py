"""The indexer's paged logits on a GPU: checks variants against float64, then times them.

PYTHONPATH=CHECKOUT[:VLLM] python logits.py
"""
import os, subprocess, sys, time
START = time.time()
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import torch
import triton
import variants
from attn.bench.cases.sparse import filled_cache
from attn.bench.measure.timing import graph_times_us, make_clock, time_interleaved
from present import hopper_paged_logits_kernel
from specs.base import cdiv
from specs.rows import LatentFormat

import importlib.util
_spec = importlib.util.spec_from_file_location("pieces_now", os.environ.get("PIECES", "/tmp/repo/attn/kernels/sparse/indexer/hopper_logits.py"))
_pieces = importlib.util.module_from_spec(_spec)
sys.modules["pieces_now"] = _pieces
_spec.loader.exec_module(_pieces)

D = torch.device(os.environ.get("DEV", "cuda"))
E4M3 = torch.float8_e4m3fn
SMS = 132
RING = dict(STAGES=4, EARLY=False, MODE=0, WAITS=False)
# name: kernel, registers, constexprs
KERNELS = {
    "now": (hopper_paged_logits_kernel, None, {}),
    "now96": (hopper_paged_logits_kernel, 96, {}),
    "l2": (variants.l2_kernel, None, dict(AHEAD=4)),
    "ring4": (variants.ring_kernel, None, RING),
    "early4": (variants.ring_kernel, None, RING | dict(EARLY=True)),
    "ring3": (variants.ring_kernel, None, RING | dict(STAGES=3)),
    "pdl4": (variants.ring_kernel, None, RING | dict(WAITS=True)),
    "even": (variants.even_kernel, None, dict(STAGES=4)),
    "pieces": (_pieces.hopper_paged_logits_kernel, None, {}),
    "copies": (variants.ring_kernel, None, RING | dict(MODE=1)),
}


def todays_pages(rows, blocks, most=16):
    pages = min(most, rows * blocks // (8 * SMS))
    return 1 << (max(pages, 1).bit_length() - 1)


class Case:
    """Rows of requests; memory that is not theirs is poison if ``poison``."""

    def __init__(self, lens, heads=64, width=None, drafts=1, poison=False, seed=0):
        """lens: of each request's last token; width: keys that a table has room for."""
        g = torch.Generator(D).manual_seed(seed)
        n, width = len(lens), width or max(max(lens), 1)
        self.blocks = cdiv(width, 64)
        need = [cdiv(x, 64) for x in lens]
        total = sum(need) + 3
        row = LatentFormat.INDEXER_FP8.row(128)
        self.cache = filled_cache(row, total, D, seed, scales=True)
        order = torch.randperm(total, device=D, generator=g).int()
        self.table = torch.full((n, self.blocks), 2**30 if poison else 0, dtype=torch.int32, device=D)
        at = 0
        for r, k in enumerate(need):
            self.table[r, :k] = order[at : at + k]
            at += k
        self.words = self.cache.view(-1).view(torch.int32)
        self.stride = self.cache.stride(0) // 4
        data = self.cache.view(total, -1)
        self.floats = data.view(torch.float32)
        if poison:
            data[order[at:].long()] = 0x7F
            self.floats[order[at:].long(), 2048:] = float("nan")
            for r, x in enumerate(lens):
                if x % 64:
                    last = int(self.table[r, x // 64])
                    data[last, (x % 64) * 128 : 8192] = 0x7F
                    self.floats[last, 2048 + x % 64 :] = float("nan")
        self.requests = torch.arange(n, device=D).repeat_interleave(drafts).int() if drafts > 1 or poison else None
        given = torch.tensor(lens, device=D)
        back = torch.arange(drafts - 1, -1, -1, device=D)
        self.lens = (given[:, None] - back).clamp(min=0).flatten().int()
        if poison and self.requests is not None:
            mix = torch.randperm(len(self.lens), device=D, generator=g)
            self.requests, self.lens = self.requests[mix].contiguous(), self.lens[mix].contiguous()
        rows = len(self.lens)
        self.q = torch.randn(rows, heads, 128, device=D, generator=g).to(E4M3)
        self.w = torch.randn(rows, heads, device=D, generator=g)
        self.out = torch.full((rows, self.blocks * 64), float("nan"), device=D)
        self.drafts, self.heads, self.n, self.width = drafts, heads, n, width

    def launch(self, name, pages=None, out=None):
        kernel, registers, extra = KERNELS[name]
        rows = len(self.lens)
        pages = pages or todays_pages(rows, self.blocks)
        out = self.out if out is None else out
        most = self.blocks * 64
        q = self.q.view(torch.int32)
        flat = self.cache.view(torch.int32) if False else self.words
        given = dict(
            q_ptr=q, weights_ptr=self.w, data_ptr=flat, scale_ptr=flat.view(torch.float32)[2048:], table_ptr=self.table,
            requests_ptr=self.requests, lens_ptr=self.lens, logits_ptr=out, q_token=q.stride(0), q_head=q.stride(1),
            weights_token=self.w.stride(0), data_block=self.stride, scale_block=self.stride, table_row=self.table.stride(0),
            logits_row=out.stride(0), most=most, NUM_HEADS=self.heads, HEADS=max(triton.next_power_of_2(self.heads), 32),
        )
        grid = (cdiv(self.blocks, pages), rows)
        if "slots" in kernel.arg_names:
            # Here the number is one of rounds of programs.
            given |= {"rows": rows, "slots": 4 * SMS}
            grid = (min(4 * SMS * pages, rows * self.blocks),)
        elif name == "pieces":
            q = self.q.view(torch.uint8)
            given |= {"rows": rows, "q_ptr": q, "q_token": q.stride(0), "q_head": q.stride(1), "data_ptr": flat.view(torch.uint8), "data_block": 4 * self.stride}
            grid = (cdiv(max(6 * rows, 1), pages * SMS) * pages * SMS,)
        else:
            given |= {"count": pages} if "count" in kernel.arg_names else {"PAGES": pages}
        options = {"num_warps": 4, "num_stages": 2} | ({"maxnreg": registers} if registers else {}) | ({"launch_pdl": True} if extra.get("WAITS") else {})
        return kernel[grid](**given, **extra, **options)

    def wrong(self, out, some=None):
        """Largest error over the sum of absolute terms; places written that must not be."""
        worst = 0.0
        requests = self.requests if self.requests is not None else torch.arange(len(self.lens), device=D)
        lens = self.lens.tolist()
        for t in some if some is not None else range(len(lens)):
            x = lens[t]
            blocks = self.table[int(requests[t]), : cdiv(x, 64)].long()
            data = self.cache.view(len(self.cache), -1)[blocks]
            k = data[:, :8192].contiguous().view(E4M3).double().view(-1, 128)[:x]
            k = k * self.floats[blocks, 2048:].double().reshape(-1, 1)[:x]
            q, w = self.q[t].double(), self.w[t].double()
            want = w @ (q @ k.T).relu()
            size = w.abs() @ (q.abs() @ k.abs().T)
            error = ((out[t, :x].double() - want).abs() / size)
            if x and not bool((error <= 2.0**-20).all()):
                worst = max(worst, float("inf") if bool(error.isnan().any()) else float(error.max()))
            elif x:
                worst = max(worst, float(error.max()))
            if not bool(out[t, x:].isnan().all()):
                worst = float("inf")
        return worst


def warm(index, of):
    """Compile some of the kernels."""
    if index >= of:
        return peer(Case([640] * 64, heads=64 if index == of else 32))
    jobs = []
    for name in ("now", "ring4", "even", "pieces", "copies"):
        for heads in (64, 32, 20):
            for has_requests in (False, True):
                for pages in (16, 8, 4, 2, 1) if name == "now" else (4,):
                    if heads != 64 and (name in ("even", "copies") or pages not in (1, 4, 16)):
                        continue
                    jobs.append((name, heads, has_requests, pages))
    for i, (name, heads, has_requests, pages) in enumerate(jobs):
        if i % of == index:
            c = Case([64], heads=heads, drafts=2 if has_requests else 1)
            c.launch(name, pages)
    torch.cuda.synchronize()


CHECKS = {
    "short rows, poison, permuted requests": dict(lens=[5000, 1, 64, 65, 0, 2048, 4097, 127, 128, 129, 190, 256, 319], poison=True),
    "drafts, wide table": dict(lens=[5000, 3, 66, 2049, 16384], width=20000, drafts=4, poison=True),
    "many": dict(lens=[3000 + 37 * i for i in range(60)], poison=True),
    "32 heads": dict(lens=[5000, 1, 64, 65, 700], poison=True, heads=32),
    "20 heads": dict(lens=[5000, 1, 64, 65, 700], poison=True, heads=20),
}


def checks():
    for what, given in CHECKS.items():
        c = Case(**given, seed=7)
        names = ["now", "pieces"]
        first, said, last = None, [], None
        for name in names:
            for pages in (1, 5, 8) if name == "pieces" else (1,) if c.heads != 64 else (4, 16):
                if name == "now96" or (name == "l2" and pages != 4):
                    continue
                out = torch.full_like(c.out, float("nan"))
                try:
                    c.launch(name, pages, out)
                    torch.cuda.synchronize()
                except Exception as error:
                    said.append(f"{name} FAILED {repr(error)[:200]}")
                    continue
                found = c.wrong(out)
                same = True
                if first is None or name != last:
                    first = out
                else:
                    same = torch.equal(first.nan_to_num(nan=-7.0), out.nan_to_num(nan=-7.0))
                last = name
                said.append(f"{name}/{pages} {'ok' if found <= (2.0**-11 if name == 'pieces' else 2.0**-20) else 'WRONG'} {found:.1e}{'' if same else ' OTHER BITS'}")
        print(f"check {what}: " + "; ".join(said), flush=True)


SHAPES = {
    "64 x 32k": dict(lens=[32768] * 64),
    "1 x 128k": dict(lens=[131072]),
    "64 x 4k": dict(lens=[4096] * 64),
    "64 x 8k": dict(lens=[8192] * 64),
    "16 x 32k, 4 tokens": dict(lens=[32768] * 16, drafts=4),
    "64 of 1 to 32k": dict(lens=[1 + (i * 7919) % 32768 for i in range(64)]),
    "1 of 128k, 63 of 2k": dict(lens=[131072] + [2048] * 63),
    "64 x 4k, room for 128k": dict(lens=[4096] * 64, width=131072),
    "8 x 32k": dict(lens=[32768] * 8),
    "4 x 1k": dict(lens=[1024] * 4),
    "64 x 32k, 32 heads": dict(lens=[32768] * 64, heads=32),
}


def peer(c):
    """DeepGEMM as vLLM calls it on Hopper, where each draft token is a row with a table of its own."""
    import vllm.utils.deep_gemm as dg
    rows = len(c.lens)
    lens = c.lens[:, None].contiguous()
    table = c.table if c.requests is None else c.table[c.requests.long()].contiguous()
    schedule = dg.get_paged_mqa_logits_metadata(lens, 64, torch.cuda.get_device_properties(D).multi_processor_count)
    q = c.q.view(rows, 1, c.heads, 128)
    cache = c.cache.view(len(c.cache), 64, 1, 132)

    def call():
        return dg.fp8_fp4_paged_mqa_logits((q, None), cache, c.w, lens, table, schedule, max_model_len=c.blocks * 64, clean_logits=False)

    call()
    torch.cuda.synchronize()
    return call


def times():
    clock = make_clock(D, 20)
    for what, given in SHAPES.items():
        if time.time() - BEGIN[0] > 60:
            print("no time for", what, flush=True)
            continue
        c = Case(**given, seed=3)
        total = int(((c.lens + 63) // 64).sum())
        one_wave = 1 << max((total // (4 * SMS) - 1).bit_length(), 0) if total > 4 * SMS else 1
        calls = {}
        today = todays_pages(len(c.lens), c.blocks)
        listed = [("now", today), ("ring4", 16), ("even", 1), ("pieces", 4), ("pieces", 5), ("pieces", 10)]
        if what == "64 x 32k":
            listed += [("ring4", 64), ("copies", 16)]
        elif c.heads != 64:
            listed = [("now", today), ("ring4", 16), ("pieces", 5)]
        if False:
            listed += [("now96", 16), ("copies", 16), ("copies", 64)]
            listed += [("ring4", p) for p in (8, 16, 32, 64)] + [("ring3", p) for p in (8, 16)] + [("early4", 16), ("pdl4", 16), ("pdl4", 8)]
            listed += [("even", 1), ("even", 2), ("even", 4)]
        elif False:
            listed += [("ring4", p) for p in sorted({2, 4, 8, 16, today, min(one_wave, 16)})] + [(name, min(one_wave, 16)) for name in ("ring3", "early4", "pdl4")] + [("even", 1), ("even", 2), ("even", 4)]
        for name, pages in listed:
            if name == "l2" and (pages == 1 or pages == 8):
                pages = max(2, pages // 2)
            try:
                c.launch(name, pages)
                torch.cuda.synchronize()
                calls[f"{name}/{pages}"] = lambda name=name, pages=pages: c.launch(name, pages)
            except Exception as error:
                print(what, name, pages, "FAILED", repr(error)[:200], flush=True)
        try:
            calls["DeepGEMM"] = peer(c)
        except Exception as error:
            print(what, "DeepGEMM FAILED", repr(error)[:300], flush=True)
        alone = time_interleaved(calls, clock, 3, 20)
        graph = graph_times_us(calls, D, 4)
        nbytes = 8448 * total / c.drafts + 4 * int(c.lens.sum())
        c.launch("ring4", 4)
        some = [0, len(c.lens) // 2, len(c.lens) - 1]
        error = c.wrong(c.out, some)
        print(f"time {what} (today {today} pages; wave {one_wave}; {nbytes / 4.3e6:.1f} us at 4.3 TB/s; error {error:.1e})", flush=True)
        for name in calls:
            print(f"  {name:10s} alone {alone[name].median_us:7.1f}  graph {graph[name].median_us:7.1f}  {nbytes / graph[name].median_us / 1e6:.2f} TB/s", flush=True)
        del c, calls
        torch.cuda.empty_cache()
    print(f"done after {time.time() - START:.0f} s", flush=True)


BEGIN = [0.0]


def take_gpu():
    import fcntl
    global LOCK
    LOCK = open("/tmp/gpu0.lock", "w")
    fcntl.flock(LOCK, fcntl.LOCK_EX)
    BEGIN[0] = time.time()
    print(f"GPU after {time.time() - START:.0f} s", flush=True)


def main():
    if len(sys.argv) > 1 and sys.argv[1] == "--warm":
        return warm(int(sys.argv[2]), int(sys.argv[3]))
    global SMS
    properties = torch.cuda.get_device_properties(D)
    SMS = properties.multi_processor_count
    print(properties.name, torch.__version__, triton.__version__, flush=True)
    of = 12
    children = [subprocess.Popen([sys.executable, os.path.abspath(__file__), "--warm", str(i), str(of)], env={**os.environ, "CUDA_VISIBLE_DEVICES": os.environ.get("WARM_GPU", "0")}) for i in range(of + 2)]
    try:
        import vllm.utils.deep_gemm  # meanwhile
    except Exception as error:
        print("no DeepGEMM:", repr(error)[:200], flush=True)
    for child in children:
        try:
            child.wait(timeout=max(1, 150 - (time.time() - START)))
        except subprocess.TimeoutExpired:
            child.kill()
            print("a process took too long to compile", flush=True)
    print(f"compiled after {time.time() - START:.0f} s", flush=True)
    if not os.environ.get("SKIP_CHECKS"):
        checks()
    take_gpu()
    times()


if __name__ == "__main__":
    main()
