"""Peers: kernels of other projects that ours are compared with."""
