. .gpu/base/setup.sh
mkdir -p /tmp/k /tmp/o/w; cp .gpu/k7/* /tmp/k; mkdir -p /tmp/repo; tar c --exclude .gpu --exclude .git . | tar x -C /tmp/repo
nvidia-smi -L; nproc; python3 -c "import vllm; print(vllm.__version__)" 2>&1 | tail -1
