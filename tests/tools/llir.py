"""What LLVM's code of a kernel leaves to the compilers behind it."""

from __future__ import annotations

import re


def mergeable_exponents(llir: str) -> list[str]:
    """Powers of two whose exponent is a product and a sum that a compiler may merge.

    Merged, they round once. A compiler may merge them in one kernel and not in another, and kernels
    of online softmax then have other bits for the same scores. An explicit fma is the same in all.

    Args:
        llir: of one kernel, as Triton keeps it in ``asm["llir"]``.
    """
    made = dict(re.findall(r"^\s*(%[\w.]+) = (.*)$", llir, re.MULTILINE))

    def is_a(name: str, operations: str) -> bool:
        return re.match(rf"({operations})\b", made.get(name, "")) is not None

    found = []
    for call, exponent in re.findall(
        r"^\s*(.*\bex2\b.*\(float (%[\w.]+)\).*)$", llir, re.MULTILINE
    ):
        terms = re.findall(r"%[\w.]+", made.get(exponent, ""))
        if is_a(exponent, "fadd|fsub") and any(is_a(term, "fmul") for term in terms):
            found.append(call)
    return found
