import time, torch, sys
a = torch.randn(40, 600, 512, dtype=torch.float64, device="cuda"); b = torch.randn(40, 512, 600, dtype=torch.float64, device="cuda")
torch.cuda.synchronize(); t = time.time(); (a @ b).sum().item(); print("f64", round(time.time() - t, 2), flush=True)
c = a.bfloat16(); t = time.time(); (c @ b.bfloat16()).sum().item(); print("bf16", round(time.time() - t, 2), flush=True)
c = a.float(); t = time.time(); torch.softmax(c @ b.float(), -1).sum().item(); (a[0] @ b[0][:, :1]).sum().item(); print("f32", round(time.time() - t, 2), flush=True)
