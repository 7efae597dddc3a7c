"""The assembler that unpacks 4 bits, which Triton's interpreter cannot run, step by step in Python."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import torch

import vla_ros.engine

SOURCE = Path(vla_ros.engine.__file__).parent / "kernels" / "int4.py"


def halves(register: int) -> torch.Tensor:
    """The two bfloat16 of a register."""
    return torch.from_numpy(np.array([register], np.uint32).view(np.int16)).view(torch.bfloat16)


def register(values: torch.Tensor) -> int:
    return int(values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint32)[0])


def permute(a: int, b: int, selector: int) -> int:
    """PTX ``prmt`` in its default mode."""
    pool = [(word >> shift) & 255 for word in (a, b) for shift in (0, 8, 16, 24)]
    return sum(pool[(selector >> 4 * i) & 7] << 8 * i for i in range(4))


def logic(a: int, b: int, c: int, table: int) -> int:
    """PTX ``lop3``: bit i of the answer is bit 4 a + 2 b + c of the table."""
    bits = ((4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) for i in range(32))
    return sum((table >> at & 1) << i for i, at in enumerate(bits))


def fused(a: int, b: int, c: int) -> int:
    """PTX ``fma.rn.bf16x2``; float32 holds every product here."""
    return register(halves(a).float() * halves(b).float() + halves(c).float())


STEPS = {
    "mov.b32": lambda a: a,
    "prmt.b32": permute,
    "lop3.b32": logic,
    "shr.u32": lambda a, b: a >> b,
    "fma.rn.bf16x2": fused,
}


def run(code: str, inputs: dict[str, int]) -> dict[str, int]:
    registers = dict(inputs)

    def value(word: str) -> int:
        return registers[word] if word in registers else int(word, 0)

    for line in code.split(";"):
        words = re.sub(r"[{},]", " ", line).split()
        if words and words[0] != ".reg":
            registers[words[1]] = STEPS[words[0]](*map(value, words[2:]))
    return registers


def test_the_assembler_unpacks_each_nibble_of_each_word():
    code = re.search(r'inline_asm_elementwise\(\s*"""(.*?)"""', SOURCE.read_text(), re.DOTALL).group(1)
    assert code.count(";") > 20
    chance = random.Random(3)
    for _ in range(50):
        words = [chance.getrandbits(32) for _ in range(2)]
        zeros = [chance.randrange(16) for _ in range(2)]
        offset = register(torch.tensor([-128.0 - zero for zero in zeros]))
        out = run(code, {"$8": words[0], "$9": words[1], "$10": offset})
        for j in range(8):
            expected = [(word >> 4 * j & 15) - zero for word, zero in zip(words, zeros, strict=True)]
            assert halves(out[f"${j}"]).tolist() == expected
