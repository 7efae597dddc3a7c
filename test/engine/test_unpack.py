"""The assembler that unpacks 4 and 8 bits, which Triton's interpreter cannot run, step by step in Python."""

import re

import numpy as np
import pytest
import torch

from vla_ros_models.engine import lowbit

unpack = pytest.importorskip("vla_ros_models.engine.kernels.unpack", reason="triton is not installed (extra 'dev')")


def halves(register: int, kind: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The two numbers of a register."""
    return torch.from_numpy(np.array([register], np.uint32).view(np.int16)).view(kind)


def register(values: torch.Tensor, kind: torch.dtype = torch.bfloat16) -> int:
    return int(values.to(kind).view(torch.int16).numpy().view(np.uint32)[0])


def permute(a: int, b: int, selector: int) -> int:
    """PTX ``prmt`` in its default mode."""
    pool = [(word >> shift) & 255 for word in (a, b) for shift in (0, 8, 16, 24)]
    return sum(pool[(selector >> 4 * i) & 7] << 8 * i for i in range(4))


def logic(a: int, b: int, c: int, table: int) -> int:
    """PTX ``lop3``: bit i of the answer is bit 4 a + 2 b + c of the table."""
    bits = ((4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) for i in range(32))
    return sum((table >> at & 1) << i for i, at in enumerate(bits))


def fused(a: int, b: int, c: int, kind: torch.dtype = torch.bfloat16) -> int:
    """PTX ``fma.rn``; float32 holds every product here."""
    return register(halves(a, kind).float() * halves(b, kind).float() + halves(c, kind).float(), kind)


STEPS = {
    "mov.b32": lambda a: a,
    "prmt.b32": permute,
    "lop3.b32": logic,
    "shr.u32": lambda a, b: a >> b,
    "fma.rn.bf16x2": fused,
    "fma.rn.f16x2": lambda a, b, c: fused(a, b, c, torch.float16),
    "add.rn.f16x2": lambda a, b: fused(a, 0x3C003C00, b, torch.float16),
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


def pair_of_words(numbers: torch.Tensor, bits: int) -> list[int]:
    """Words 0 and 1 of one fragment in which both hold the numbers [2, count], all others being 0."""
    places = torch.zeros(lowbit.FRAGMENT_N, lowbit.k_group(bits), dtype=torch.uint8)
    places[0, 0::16], places[0, 1::16] = numbers.to(torch.uint8)
    words = lowbit.pack_weights(places, bits)[0, 0]
    assert not words[2:].any()
    return [word & 0xFFFFFFFF for word in words[:2].tolist()]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_the_assembler_unpacks_each_nibble_of_each_pair_of_words(kind):
    half = kind == torch.float16
    code, chance = (unpack.INT4_HALF if half else unpack.INT4).value, torch.Generator().manual_seed(3)
    assert code.count(";") > 20
    for _ in range(50):
        numbers = torch.randint(0, 16, (2, 8), generator=chance)
        zero = torch.randint(0, 16, (1,), generator=chance).item()
        low, high = pair_of_words(numbers, 4)
        added = {f"$1{i}": -start - zero for i, start in enumerate((1024.0, 64.0) if half else (128.0,))}
        added = {name: register(torch.full((2,), number), kind) for name, number in added.items()}
        out = run(code, {"$8": low, "$9": high, **added})
        for j in range(8):
            assert halves(out[f"${j}"], kind).tolist() == (numbers[:, j] - zero).tolist()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_the_assembler_unpacks_every_byte_in_every_place(kind):
    code = (unpack.INT8_HALF if kind == torch.float16 else unpack.INT8).value
    assert code.count(";") > 12
    for first in range(-128, 128):
        numbers = (torch.arange(8).view(2, 4) * 37 + first + 128) % 256 - 128
        low, high = pair_of_words(numbers % 256, 8)
        out = run(code, {"$4": low, "$5": high})
        for j in range(4):
            assert halves(out[f"${j}"], kind).tolist() == numbers[:, j].tolist()
