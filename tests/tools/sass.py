"""Reads machine code of sm_90, and finds what a compiler must not do."""

from __future__ import annotations

import functools
import operator
import re
from dataclasses import dataclass

_INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,5})\*/\s+(.*?);")
_UNIFORM = re.compile(r"\bUR(\d+)\b")
_PREDICATE = re.compile(r"U?P(T|\d)")
# Opcodes in U that write no uniform register, and other opcodes that do.
_NO_TARGET = {"USETMAXREG", "UTMALDG", "UTMASTG", "UTMAPF", "UBLKCP", "UTMACMDFLUSH", "UCGABAR"}
_TARGET = {"R2UR", "S2UR", "VOTEU", "ELECT", "REDUX"}
_INDIRECT = -1
# Opcodes that write no register, or no register that a thread may not touch meanwhile.
_NO_RESULT = {
    *("ST", "STG", "STS", "STL", "STSM", "RED", "BAR", "BRA", "BRX", "CALL", "RET", "EXIT", "NOP"),
    *("WARPSYNC", "WARPGROUP", "HGMMA", "MEMBAR", "FENCE", "SYNCS", "CCTL", "ERRBAR", "BSSY"),
    *("BSYNC", "DEPBAR", "UTMALDG", "UTMASTG", "PMTRIG", "NANOSLEEP"),
    *("ISETP", "FSETP", "DSETP", "HSETP2", "PLOP3", "R2P"),
}
_PRODUCT = re.compile(r"(?:@\S+ )?HGMMA\.\S+ R\d+, (?:R(\d+)|gdesc)")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)")
_MOST_GROUPS = 8

_Groups = tuple[frozenset[int], ...]
"""Registers that groups of running products read, oldest group first; the last group is still
open."""


@dataclass
class _Instruction:
    text: str
    written: set[int]
    read: set[int]
    next: list[int]
    copies: bool = False
    """It moves a register, which may be one of a group that nobody looks at: what was not written
    is not written in the copy either, and to move it is no use of it."""
    calls: bool = False
    """It calls a function, without a condition."""
    returns: bool = False
    returned: int = 0
    """Bits of the registers that the called function has written when it comes back."""
    before: int | None = None
    """Bits of the registers that every path to here has written; None until one path is known."""

    @property
    def after(self) -> int:
        assert self.before is not None
        written = sum(1 << register for register in self.written)
        if self.copies and _misses(self, self.before):
            return self.before & ~written
        return self.before | written


def undefined_reads(sass: str) -> list[str]:
    """Reads of uniform registers that some path to them never wrote.

    ptxas 12.8 computed a part of an address ahead of a loop and used it behind it, too, where the
    loop had been skipped: products then read anything as their operand.

    Args:
        sass: of one kernel, as ``cuobjdump -sass`` prints it.
    """
    code = _parsed(sass)
    if not code:
        return []
    _note_results(code)
    code[0].before = 0
    _spread(code, [0])
    # The text does not name the targets of an indirect branch: they are what nothing else leads to.
    jumps = [one for one in code if _INDIRECT in one.next and one.before is not None]
    for i, one in enumerate(code):
        if one.before is None and jumps and not one.text.startswith(("NOP", "BRA")):
            one.before = jumps[0].after
            _spread(code, [i])
    known = [one for one in code if one.before is not None and not one.copies]
    return [one.text for one in known if _misses(one, one.before or 0)]


def _note_results(code: list[_Instruction]) -> None:
    """Note for every call what the called function writes on all paths to its returns.

    ptxas 13.4 returns the quotient of two int64 in a uniform register. A copy of what only the
    caller has written does not count.
    """
    for i, one in enumerate(code):
        if not one.calls or one.next[0] == i + 1:
            continue
        code[one.next[0]].before = 0
        _spread(code, [one.next[0]])
        ends = [end.before for end in code if end.before is not None and end.returns]
        one.returned = functools.reduce(operator.and_, ends) if ends else 0
        for other in code:
            other.before = None


def _misses(one: _Instruction, known: int) -> bool:
    return any(not known >> register & 1 for register in one.read)


def _spread(code: list[_Instruction], work: list[int]) -> None:
    """Follow all paths from these instructions, and note the registers written on every path."""
    while work:
        at = work.pop()
        one = code[at]
        for i in one.next:
            if i == _INDIRECT:
                continue
            known, after = code[i].before, one.after
            if i == at + 1:
                after |= one.returned
            new = after if known is None else known & after
            if new != known:
                code[i].before = new
                work.append(i)


def _parsed(sass: str) -> list[_Instruction]:
    found = [match for match in map(_INSTRUCTION.match, sass.splitlines()) if match]
    place = {int(match[1], 16): i for i, match in enumerate(found)}
    return [_one(i, match[2].strip(), place) for i, match in enumerate(found)]


def _one(i: int, text: str, place: dict[int, int]) -> _Instruction:
    predicated = re.match(r"@\S+\s+", text)
    bare = text[predicated.end() :] if predicated else text
    name, _, rest = bare.partition(" ")
    base, operands = name.split(".")[0], [part.strip() for part in rest.split(",")]
    pairs = ".64" in name or ".WIDE" in name
    written: set[int] = set()
    sources = operands
    if (base.startswith("U") and base not in _NO_TARGET) or base in _TARGET:
        first = next((k for k, x in enumerate(operands) if not _PREDICATE.fullmatch(x)), 0)
        for register in map(int, _UNIFORM.findall(operands[first])):
            written |= {register, register + 1} if pairs else {register}
        sources = operands[first + 1 :]
    read = {
        int(number) + k
        for place_of, part in enumerate(sources)
        for number in _UNIFORM.findall(part)
        for k in _span(part, place_of)
    }
    following = _next(i, base, operands, bool(predicated), place)
    return _Instruction(
        text, written, read, following,
        copies=base in ("UMOV", "MOV") and bool(read),
        calls=base == "CALL" and not predicated,
        returns=base == "RET",
    )  # fmt: skip


def _span(part: str, place: int) -> range:
    """The registers of an operand, starting at the register that it names."""
    if "gdesc" in part:
        # Descriptors of both operands of a product; of one only where the left is in registers.
        return range(0 if place == 1 else 2, 4)
    return range(2 if "desc" in part else 1)


def _next(
    i: int, base: str, operands: list[str], predicated: bool, place: dict[int, int]
) -> list[int]:
    if base in ("EXIT", "RET"):
        return [i + 1] if predicated else []
    if base in ("BRX", "BRXU"):
        return [_INDIRECT]
    # A call has two successors: where it goes, and where it comes back to, with all that it had
    # and what the function has written.
    if base not in ("BRA", "CALL"):
        return [i + 1] if i + 1 < len(place) else []
    target = place.get(int(operands[-1], 16)) if operands[-1].startswith("0x") else None
    others = predicated or len(operands) > 1 or base == "CALL"
    return [*([] if target is None else [target]), *([i + 1] if others else [])]


def overwritten_operands(sass: str) -> list[str]:
    """Writes to registers that a product by warp group reads, on a path that has not waited for it.

    Such a product reads its left operand, where that is in registers, while the program goes on.
    ptxas before 13.3 lets other values have them meanwhile, as CUDA's release notes say.

    Args:
        sass: of one kernel, as ``cuobjdump -sass`` prints it.
    """
    code = [(one.text, _registers(one.text), one.next) for one in _parsed(sass)]
    seen: list[set[_Groups]] = [set() for _ in code]
    found: set[int] = set()

    def walk(begin: int) -> None:
        work: list[tuple[int, _Groups]] = [(begin, (frozenset(),))]
        while work:
            i, groups = work.pop()
            if groups in seen[i]:
                continue
            seen[i].add(groups)
            text, written, following = code[i]
            if any(written & group for group in groups):
                found.add(i)
            after = _under_way(text, groups)
            work += [(k, after) for k in following if k != _INDIRECT]

    for i in range(len(code)):
        # What nothing leads to is where an indirect branch goes: nothing is under way there.
        if not seen[i]:
            walk(i)
    return [code[i][0] for i in sorted(found)]


def _under_way(text: str, groups: _Groups) -> _Groups:
    """Groups of products behind an instruction."""
    product, wait = _PRODUCT.match(text), _WAIT.match(text)
    if product:
        first = None if product[1] is None else int(product[1])
        operand = () if first is None else range(first, first + 4)
        groups = (*groups[:-1], groups[-1].union(operand))
        if text.endswith("gsb0"):
            groups = (*groups, frozenset())
    elif wait:
        closed = groups[:-1]
        groups = (*closed[max(len(closed) - int(wait[1], 16), 0) :], groups[-1])
    if len(groups) > _MOST_GROUPS:
        groups = (groups[0] | groups[1], *groups[2:])
    return groups


def _registers(text: str) -> frozenset[int]:
    """Registers of a thread that an instruction writes."""
    name, _, rest = re.sub(r"^@\S+\s+", "", text).partition(" ")
    base, *kinds = name.split(".")
    if base in _NO_RESULT:
        return frozenset()
    operands = [part.strip() for part in rest.split(",")]
    target = next((part for part in operands if not _PREDICATE.fullmatch(part)), "")
    register = re.fullmatch(r"R(\d+)", target)
    if register is None:
        return frozenset()
    count = 1
    if {"64", "WIDE"} & {*kinds} or (base == "CS2R" and "32" not in kinds):
        count = 2
    if base == "LDSM":
        count = int(kinds[-1]) if kinds[-1].isdigit() else 1
    if "128" in kinds or base in ("HMMA", "QMMA"):
        count = 4
    return frozenset(range(int(register[1]), int(register[1]) + count))
