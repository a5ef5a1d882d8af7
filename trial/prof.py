import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import lazy, torch
from attn.bench.cases.inputs import make_content
name, way = sys.argv[1:3]
with torch.inference_mode():
    device = torch.device("cuda")
    case, generator = lazy.cases()[name], torch.Generator().manual_seed(1)
    content = make_content(case, device, generator)
    layer = lazy.made(case, content, generator, device)
    call, output = lazy.engine(layer, case, way)
    for _ in range(3): call()
    torch.cuda.synchronize()
