"""Every operation in plain torch: readable, float64-capable, the twin of the kernels.

Arithmetic is float64 when the query is, else float32; inputs and outputs keep their own types.
"""
