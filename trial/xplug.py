import sys
sys.path.insert(0, ".")
import os
import pytest
@pytest.hookimpl(tryfirst=True)
def pytest_collection(session):
    import attn.kernels.latent.hopper_wide.kernel as k, attn.kernels.latent.hopper_wide.fold as f
    import x_wide, x_fold
    k.hopper_mla_kernel = x_wide.hopper_mla_kernel
    f.fold_cuts_kernel = x_fold.fold_cuts_kernel
    from builders.buffers import GraphBuffers as B
    plain = B.declare
    B.declare = lambda self, name, shape, *m, **n: plain(self, name, (3 * shape[0],) if name == "counters" else shape, *m, **n)
    if os.environ.get("XMEET"):
        import threading, time
        from tests.tools import gluon_in_numpy as g
        lock = threading.Lock()
        def add(at, x, sem, scope):
            if int(x) == 0:
                time.sleep(0.05)
            with lock:
                before = g._load(at); g._store(at, before + x)
            if int(x) == 16:
                with open("._met.txt", "a") as f: f.write("met\n")
            return before
        g._GLUON.atomic_add = add
        def run(call, programs, translation):
            function = translation.function(call.kernel); arguments = g._arguments(call.arguments)
            g._memory["grid"] = call.grid
            bad = []
            def one(p):
                g._here.program = p; g._here.is_open = not call.waits
                try:
                    function(**arguments); assert g._is_open()
                except BaseException as e:
                    bad.append(e)
            ts = [threading.Thread(target=one, args=(p,)) for p in programs]
            [t.start() for t in ts]; [t.join() for t in ts]
            if bad: raise bad[0]
        g.run = run
