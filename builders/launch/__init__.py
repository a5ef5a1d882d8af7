"""Launching Triton kernels: the one door to the GPU.

:mod:`builders.launch.call` holds a launch as data (``KernelCall``), to be made, listed or compiled
ahead. :mod:`builders.launch.launcher` makes launches: a ``Launcher`` keeps the kernel that Triton
compiled and calls it again with other addresses. :mod:`builders.launch.compiled` is the only module
that knows Triton's launcher from inside. :mod:`builders.launch.absent` and
:mod:`builders.launch.ahead` collect and compile launches for a GPU that need not be there.

Import the modules by name. This package imports none of them, so that builders stay importable
without Triton.
"""
