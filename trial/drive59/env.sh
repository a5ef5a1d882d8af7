export PYTHONPATH=${FI}/site:${ROOT} PATH=/usr/local/cuda/bin:${ROOT}/.venv/bin:$PATH
export CUDA_HOME=/usr/local/cuda CPATH=${FI}/curand/nvidia/cu13/include LIBRARY_PATH=${FI}/stubs
export FLASHINFER_CUDA_ARCH_LIST=9.0a FLASHINFER_WORKSPACE_BASE=${FI}/ws FLASHINFER_DISABLE_VERSION_CHECK=1 MAX_JOBS=2
PY=${ROOT}/.venv/bin/python
