"""Registers that are written while the matrix units may still read them; used by compile_kernels.py.

``wgmma`` may take an operand from registers and reads it while the program goes on. Neither the hardware nor ptxas
keeps the program from writing to these registers once any wait was passed, even one that lets multiplications run
on. So the machine code is walked through, each loop twice, with what is in flight at each instruction.
"""

import re

_LINE = re.compile(r"\s+/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+\s+)?(.*?);")
_NO_REGISTER = ("ST", "BAR", "BRA", "LDGSTS", "WARPGROUP", "DEPBAR", "LDGDEPBAR", "EXIT", "RED", "ATOM", "NOP")


def hazards(sass: str) -> list[str]:
    """Instructions of ``cuobjdump -sass`` that write to an operand of a multiplication that may not have ended."""
    code = [(int(found[1], 16), found[2]) for line in sass.splitlines() if (found := _LINE.match(line))]
    flying: list[tuple[set[int], bool]] = []  # operands of each multiplication, and whether it ends a group
    wrong = []
    for text in _walk(code):
        name, _, rest = text.partition(" ")
        words = [word.strip() for word in rest.split(",")]
        if name.startswith(("HGMMA", "QGMMA")):
            flying.append((_registers(words[1], 4), "gsb0" in text))
        elif text.startswith("WARPGROUP.DEPBAR.LE gsb0"):
            flying = _latest(flying, int(words[1], 16))
        elif not name.startswith(_NO_REGISTER) and words[0]:
            target = words[1] if re.match(r"!?P", words[0]) and len(words) > 1 else words[0]
            written = _registers(target, 4 if ".128" in name or "LDSM" in name else 2 if "64" in name else 1)
            if any(written & operands for operands, _ in flying):
                wrong.append(text)
    return wrong


def _walk(code: list[tuple[int, str]]) -> list[str]:
    """Instructions as they run, each loop that multiplies twice."""
    at, index, again, walked = {address: i for i, (address, _) in enumerate(code)}, 0, set(), []
    while index < len(code):
        text = code[index][1]
        walked.append(text)
        jump = re.match(r"BRA\s.*?0x([0-9a-f]+)", text)
        back = at.get(int(jump[1], 16), index + 1) if jump else index + 1
        if back < index and index not in again and any("GMMA" in code[i][1] for i in range(back, index)):
            again.add(index)
            index = back
        else:
            index += 1
    return walked


def _latest(flying: list[tuple[set[int], bool]], groups: int) -> list[tuple[set[int], bool]]:
    """What may still run once at most ``groups`` groups are left."""
    ends = [i + 1 for i, (_, last) in enumerate(flying) if last]
    return flying[ends[-groups - 1] if groups < len(ends) else 0 :]


def _registers(word: str, count: int) -> set[int]:
    found = re.match(r"R(\d+)", word)
    return set(range(int(found[1]), int(found[1]) + count)) if found else set()
