"""Unpacks words in the order of :mod:`vla_ros_models.engine.lowbit` into operands of the tensor cores.

A lane unpacks its own words: number j of all words is, register by register, the tensor cores' operand for inputs
16 j to 16 j + 15 of a K-group. The compiler recognises that the layouts are equal and moves no values between
lanes.
"""

# Kernels are compiled by Triton, not by Python: no types, and constants in capitals.
# ruff: noqa: N803
# mypy: ignore-errors
import triton
import triton.language as tl

FRAGMENT_N = tl.constexpr(8)
WORDS = tl.constexpr(128)


def _assembler(words: int, count: int, bits: int, constant: str, *steps: str) -> tl.constexpr:
    """Return assembly that unpacks each word into ``count`` registers; its operands are outputs, then inputs.

    Each of ``steps`` computes register ``{to}`` from the lowest numbers in ``word``. After the last step, ``word``
    is shifted right by ``bits``, and the steps start again.
    """
    lines = [".reg .b32 word, number, sign, constant;", f"mov.b32 constant, {constant};"]
    for register in range(words * count):
        word, place = divmod(register, count)
        if place == 0:
            lines.append(f"mov.b32 word, ${words * count + word};")
        elif place % len(steps) == 0:
            lines.append(f"shr.u32 word, word, {bits};")
        lines.append(steps[place % len(steps)].format(to=f"${register}"))
    return tl.constexpr("{ " + "\n".join(lines) + " }")


# Instructions for two 4-bit weights: 2.75, of which 1.75 are logical; in float16 2.25 and 1.25. For two 8-bit
# weights: 3.5 and 2.5; in float16 2.5 and 1.5. For 32 4-bit weights in FP8: 12.
INT4 = _assembler(
    2, 4, 4, "0x3F803F80",
    "lop3.b32 number, word, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 {to}, number, constant, $10;",
)  # fmt: skip
INT4_HALF = _assembler(
    2, 4, 8, "0x2C002C00",
    "lop3.b32 number, word, 0x000F000F, 0x64006400, 0xEA; add.rn.f16x2 {to}, number, $10;",
    "lop3.b32 number, word, 0x00F000F0, 0x64006400, 0xEA; fma.rn.f16x2 {to}, number, constant, $11;",
)  # fmt: skip
INT8 = _assembler(
    2, 2, 8, "0x3F803F80",
    "lop3.b32 number, word, 0x007F007F, 0x43004300, 0xEA; lop3.b32 sign, word, 0x00800080, 0xC300C300, 0xEA; "
    "fma.rn.bf16x2 {to}, number, constant, sign;",
)  # fmt: skip
INT8_HALF = _assembler(
    2, 2, 8, "0xE480E480",
    "lop3.b32 number, word, 0x00FF00FF, 0x64806480, 0x6A; add.rn.f16x2 {to}, number, constant;",
)  # fmt: skip
NIBBLES_FP8 = _assembler(4, 2, 4, "0", "and.b32 {to}, word, 0x0F0F0F0F;")


@triton.jit
def unpack_int4(words, offset, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Return 128 + nibble j of ``words`` [A, B, 128] + ``offset``, j = 0 to 7: integers, exact in every type.

    ASM is for bfloat16 and unpacks two words at a time. A bfloat16 of exponent 7 counts in ones, so a nibble
    written into the mantissa of 128 is 128 + nibble, and one packed addition turns two such numbers into weights.
    """
    if ASM:
        n0, n1, n2, n3, n4, n5, n6, n7 = tl.inline_asm_elementwise(
            INT4, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r", [words, offset], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=2
        )
    else:
        words, add = side_by_side(words), offset.to(tl.float32) + 128.0
        n0 = ((words & 15).to(tl.float32) + add).to(DTYPE)
        n1 = (((words >> 4) & 15).to(tl.float32) + add).to(DTYPE)
        n2 = (((words >> 8) & 15).to(tl.float32) + add).to(DTYPE)
        n3 = (((words >> 12) & 15).to(tl.float32) + add).to(DTYPE)
        n4 = (((words >> 16) & 15).to(tl.float32) + add).to(DTYPE)
        n5 = (((words >> 20) & 15).to(tl.float32) + add).to(DTYPE)
        n6 = (((words >> 24) & 15).to(tl.float32) + add).to(DTYPE)
        n7 = (((words >> 28) & 15).to(tl.float32) + add).to(DTYPE)
    return n0, n1, n2, n3, n4, n5, n6, n7


@triton.jit
def unpack_int4_half(words, low, high):
    """Like :func:`unpack_int4`, in float16, plus ``low`` (-1024 - zero point) or ``high`` (-64 - zero point).

    A float16 of exponent 10 counts in ones and has room for two nibbles in its mantissa. The upper nibble, 16 times
    too large, is divided by 16 in the instruction that adds ``high``.
    """
    return tl.inline_asm_elementwise(
        INT4_HALF, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r", [words, low, high], dtype=(tl.float16,) * 8, is_pure=True,
        pack=2,
    )  # fmt: skip


@triton.jit
def unpack_int8(words, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Return byte j of ``words`` [A, B, 128], j = 0 to 3: integers from -128 to 127, exact in every type.

    ASM is for bfloat16 and unpacks two words at a time. The lower 7 bits written into the mantissa of 128 give 128
    plus these bits; the sign written into the lowest exponent bit of -128 gives -128 or -256. Their sum is the
    number.
    """
    if ASM:
        n0, n1, n2, n3 = tl.inline_asm_elementwise(
            INT8, "=r,=r,=r,=r,r,r", [words], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2
        )
    else:
        words = side_by_side(words)
        n0 = ((words << 24) >> 24).to(tl.float32).to(DTYPE)
        n1 = ((words << 16) >> 24).to(tl.float32).to(DTYPE)
        n2 = ((words << 8) >> 24).to(tl.float32).to(DTYPE)
        n3 = (words >> 24).to(tl.float32).to(DTYPE)
    return n0, n1, n2, n3


@triton.jit
def unpack_int8_half(words):
    """Like :func:`unpack_int8`, in float16: a byte with inverted sign in the mantissa of 1024 is 1152 + byte."""
    return tl.inline_asm_elementwise(
        INT8_HALF, "=r,=r,=r,=r,r,r", [words], dtype=(tl.float16,) * 4, is_pure=True, pack=2
    )


@triton.jit
def nibbles_fp8(words, ASM: tl.constexpr):
    """Return the nibbles of ``words`` [A, B, 128] as FP8, in which a byte n is n * 2^-9: a mask suffices.

    In tensor 2 w + p, the four places of a lane hold nibbles p, p + 2, p + 4 and p + 6 of the lane's word w.
    """
    if ASM:
        n0, n1, n2, n3, n4, n5, n6, n7 = tl.inline_asm_elementwise(
            NIBBLES_FP8,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r",
            [words],
            dtype=(tl.float8e4nv,) * 8,
            is_pure=True,
            pack=4,
        )
    else:
        even, odd = tl.split(words.reshape(words.shape[0], words.shape[1], WORDS // 4, 2, 2))
        w0, w2 = tl.split(even)
        w1, w3 = tl.split(odd)
        n0, n1 = one_of_two(w0, 0), one_of_two(w0, 4)
        n2, n3 = one_of_two(w1, 0), one_of_two(w1, 4)
        n4, n5 = one_of_two(w2, 0), one_of_two(w2, 4)
        n6, n7 = one_of_two(w3, 0), one_of_two(w3, 4)
    return n0, n1, n2, n3, n4, n5, n6, n7


@triton.jit
def one_of_two(word, first):
    """Return every second nibble of ``word`` [A, B, 32] from bit ``first``, as FP8 [A, B, 128]."""
    number = (word[:, :, :, None] >> (first + 8 * tl.arange(0, 4))) & 15
    return number.reshape(word.shape[0], word.shape[1], WORDS).to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def matrix_fp8(packed, FRAGMENTS: tl.constexpr, ASM: tl.constexpr):
    """Unpack words [FRAGMENTS, 1, 128] of nibbles to FP8 [8 FRAGMENTS, 128], in the order of ``lowbit.reorder``.

    A nibble n becomes the FP8 number n * 2^-9, which has the same low bits.
    """
    n0, n1, n2, n3, n4, n5, n6, n7 = nibbles_fp8(packed, ASM)
    both = tl.join(tl.join(tl.join(n0, n1), tl.join(n2, n3)), tl.join(tl.join(n4, n5), tl.join(n6, n7)))
    both = both.reshape(FRAGMENTS, FRAGMENT_N, 4, 4, 2, 2, 2)  # fragment, g, t, byte, p, i, h
    return both.permute(0, 1, 6, 5, 4, 2, 3).reshape(FRAGMENTS * FRAGMENT_N, 128)


@triton.jit
def side_by_side(words):
    """Swap halves within pairs of words [A, B, 128], so that word e of a pair has all numbers of half e."""
    first, second = tl.split(words.reshape(words.shape[0], words.shape[1], WORDS // 2, 2))
    low = (first & 0xFFFF) | (second << 16)
    high = ((first >> 16) & 0xFFFF) | (second & -65536)
    return tl.join(low, high).reshape(words.shape)


@triton.jit
def read_grid(entries):
    """Return scale and offset (-128 - zero point) of 4-bit grid entries, float32."""
    return (entries << 16).to(tl.float32, bitcast=True), (entries & -65536).to(tl.float32, bitcast=True)


@triton.jit
def narrow(value, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Convert a scale or offset to bfloat16, in which ASM computes and which represents it exactly."""
    return value.to(DTYPE) if ASM else value


@triton.jit
def per_lane(entries, A: tl.constexpr, B: tl.constexpr):
    """Spread [A, B, 8], one per output of a fragment, to [A, B, 128], one per word."""
    return tl.broadcast_to(entries[:, :, :, None], (A, B, FRAGMENT_N, 16)).reshape(A, B, WORDS)


@triton.jit
def as_operand(number, FRAGMENTS: tl.constexpr, K_GROUPS: tl.constexpr):
    """View number j of all words, [FRAGMENTS, K_GROUPS, 128], as matrices [K_GROUPS, 8 FRAGMENTS, 16]."""
    split = number.reshape(FRAGMENTS, K_GROUPS, FRAGMENT_N, 4, 2, 2)  # fragment, group, g, t, h, e
    return split.permute(1, 0, 2, 4, 3, 5).reshape(K_GROUPS, FRAGMENTS * FRAGMENT_N, 16)


@triton.jit
def in_four(x, K_GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """Split [K_GROUPS, 64, ROWS] into inputs 16 j to 16 j + 15, j = 0 to 3: [K_GROUPS, 16, ROWS] each."""
    even, odd = tl.split(x.reshape(K_GROUPS, 2, 2, 16, ROWS).permute(0, 3, 4, 1, 2))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def in_eight(x, K_GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """Split [K_GROUPS, 128, ROWS] into inputs 16 j to 16 j + 15, j = 0 to 7: [K_GROUPS, 16, ROWS] each."""
    even, odd = tl.split(x.reshape(K_GROUPS, 2, 2, 2, 16, ROWS).permute(0, 4, 5, 1, 2, 3))
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x2, x6 = tl.split(x26)
    x1, x5 = tl.split(x15)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def matrix_int4(packed, entries, FRAGMENTS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Unpack words [FRAGMENTS, 1, 128] and grid entries [FRAGMENTS, 1, 8] to weights [8 FRAGMENTS, 128]."""
    scale, offset = read_grid(entries)
    offset = per_lane(narrow(offset, DTYPE, ASM), FRAGMENTS, 1)
    scale = per_lane(narrow(scale, DTYPE, ASM), FRAGMENTS, 1)
    n0, n1, n2, n3, n4, n5, n6, n7 = unpack_int4(packed, offset, DTYPE, ASM)
    even = tl.join(tl.join(n0 * scale, n4 * scale), tl.join(n2 * scale, n6 * scale))
    odd = tl.join(tl.join(n1 * scale, n5 * scale), tl.join(n3 * scale, n7 * scale))
    both = tl.join(even, odd).reshape(
        FRAGMENTS, FRAGMENT_N, 4, 2, 2, 2, 2, 2
    )  # fragment, g, t, h, e, j / 4, j / 2 % 2, j % 2
    return both.permute(0, 1, 5, 6, 7, 3, 2, 4).reshape(FRAGMENTS * FRAGMENT_N, 128).to(DTYPE)


@triton.jit
def matrix_int8(packed, FRAGMENTS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Unpack words [FRAGMENTS, 1, 128] to numbers [8 FRAGMENTS, 64], without scales."""
    n0, n1, n2, n3 = unpack_int8(packed, DTYPE, ASM)
    both = tl.join(tl.join(n0, n2), tl.join(n1, n3)).reshape(FRAGMENTS, FRAGMENT_N, 4, 2, 2, 2, 2)
    return both.permute(0, 1, 5, 6, 3, 2, 4).reshape(
        FRAGMENTS * FRAGMENT_N, 64
    )  # of fragment, g, t, h, e, j / 2, j % 2
