"""Kernels for Hopper (compute capability 9.0) in Gluon: TMA, warp specialisation, wgmma."""
