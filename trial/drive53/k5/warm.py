"""One of many processes that run cases once, so that everything is compiled: warm.py GPU."""
import contextlib, fcntl, faulthandler, io, json, os, random, sys, time
os.environ["CUDA_VISIBLE_DEVICES"] = sys.argv[1]
END = float(os.environ["WARM_END"])
QUEUE = "/tmp/o/queue.json"
LOG = open(f"/tmp/o/warm{os.getpid()}.log", "w")


def turn(change):
    with open(QUEUE + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with open(QUEUE) as file:
            queue = json.load(file)
        found = change(queue)
        with open(QUEUE, "w") as file:
            json.dump(queue, file)
    return found


def main():
    import torch
    from attn.bench.kernels import main as bench
    while time.time() < END:
        job = turn(lambda queue: queue.pop(0) if queue else None)
        if job is None:
            break
        table, case, tries = job
        begun, text = time.time(), io.StringIO()
        faulthandler.dump_traceback_later(75, file=LOG)
        with contextlib.redirect_stdout(text):
            code = bench(["--table", table, "--case", case, "--rounds", "1", "--reps", "3", "--json", f"/tmp/o/w/{table}_{case}.json"])
        faulthandler.cancel_dump_traceback_later()
        said = text.getvalue()
        print(f"== {table} {case}: {code} after {time.time() - begun:.0f} s\n{said}", file=LOG, flush=True)
        memory = "out of memory" in said.lower()
        print(f"{table} {case} {code} {time.time() - begun:.0f} s{' MEMORY' if memory else ''}", flush=True)
        if memory and tries < 3:
            turn(lambda queue: queue.append([table, case, tries + 1]))
            time.sleep(5)
        torch.cuda.synchronize()


main()
