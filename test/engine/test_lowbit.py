"""Weights of 4 and 8 bits: their values, their layout, and the tiles of their kernels."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vla_ros.errors import ConfigError
from vla_ros_models.engine import lowbit
from vla_ros_models.engine.tile_configs import GPUS, Tile, Work, choose_tile
from vla_ros_models.engine.weights import dequantize, quantize


@pytest.mark.parametrize(("kind", "bound"), [("int8", 0.012), ("int4", 0.14)])
def test_quantised_weights_are_near(kind, bound):
    weight = torch.randn(48, 256, generator=torch.Generator().manual_seed(0))
    weight[3] *= 100  # an outlier row must not cost the others anything
    back = dequantize(quantize(weight, kind, "qkv"), torch.float32)
    assert ((back - weight).norm(dim=1) / weight.norm(dim=1)).max() < bound


def test_int4_keeps_zero_and_equals_its_definition():
    """Against the same quantiser written out weight by weight, with a width that is no multiple of a group."""
    weight = torch.randn(32, 300, generator=torch.Generator().manual_seed(0))
    weight[:, ::7] = 0.0
    weight[5] = weight[5].abs()  # zero point 0
    weight[6, :128] = 0.0
    matrix = quantize(weight, "int4", "qkv")
    back = dequantize(matrix, torch.float32)
    assert (back[weight == 0] == 0).all()
    for output in (0, 5, 6, 31):
        for group in range(3):
            part = weight[output, 128 * group : 128 * group + 128]
            low, high = min(part.min().item(), 0.0), max(part.max().item(), 0.0)
            scale = torch.tensor(max((high - low) / 15, 1e-12)).bfloat16().float()
            zero = (-low / scale).round()
            numbers = (part / scale + zero).round().clamp(0, 15)
            assert torch.equal(back[output, 128 * group : 128 * group + 128], (numbers - zero) * scale)
    assert (matrix.outputs, matrix.inputs) == (32, 300)
    assert matrix.nbytes == 32 * 3 * (128 // 2 + 4)


def test_int8_equals_its_definition():
    weight = torch.randn(32, 300, generator=torch.Generator().manual_seed(0))
    weight[3], weight[4, 7] = 0.0, -9.0
    matrix = quantize(weight, "int8", "qkv")
    scale = (weight.abs().amax(dim=1) / 127).clamp_min(1e-12)[:, None]
    numbers = (weight / scale).round()
    assert numbers.min() == -127
    assert torch.equal(dequantize(matrix, torch.float32), numbers * scale)
    assert (matrix.outputs, matrix.inputs) == (32, 300)
    assert matrix.nbytes == 32 * (384 + 4)  # the width is filled up


@given(st.integers(1, 3), st.integers(1, 4), st.sampled_from([4, 8]), st.integers(0, 2**32))
def test_words_hold_what_was_packed(units, count, bits, seed):
    generator = torch.Generator().manual_seed(seed)
    size = (8 * units, lowbit.k_group(bits) * count)
    numbers = torch.randint(0, 1 << bits, size, generator=generator, dtype=torch.uint8)
    assert torch.equal(lowbit.unpack_weights(lowbit.pack_weights(numbers, bits), bits), numbers)


@pytest.mark.parametrize("bits", [4, 8])
def test_words_are_in_the_order_of_the_tensor_cores(bits):
    """Lane 4 g + t owns four words; half e of word 2 h + i has half of the inputs 16 j + 8 h + 2 t + e."""
    inputs, most = lowbit.k_group(bits), (1 << bits) - 1
    for output, number in ((3, 0), (12, 1), (15, inputs - 1), (8, 45), (0, 58)):
        numbers = torch.zeros(16, 2 * inputs, dtype=torch.uint8)
        numbers[output, inputs + number] = most
        j, h, t, e = number // 16, number // 8 % 2, number // 2 % 4, number % 2
        i, n = divmod(j, 16 // bits)
        words = lowbit.pack_weights(numbers, bits)
        assert words.shape == (2, 2, 128)
        at = words.nonzero().tolist()
        assert at == [[output // 8, 1, 4 * (4 * (output % 8) + t) + 2 * h + i]]
        assert (words[tuple(at[0])].item() >> (16 * e + bits * n)) & most == most


@pytest.mark.parametrize("bits", [8, 4])
def test_outputs_that_fill_no_tile_are_refused(bits):
    with pytest.raises(ConfigError, match=rf"{bits}-bit .* multiple of 16 .* a weight of shape \[24, 64\]"):
        quantize(torch.zeros(24, 64), f"int{bits}", "qkv")


def test_packed_weights_are_summed_in_the_same_order_whatever_the_rows():
    """What a step takes decides the order; it may depend on the device, never on the number of rows."""
    tile = Tile(16, 2048, 8, 6)
    for gpu in GPUS.values():
        works = [Work("decode", 11008, 4096, "down_proj", "int4", rows, 0.5) for rows in (8, 16, 32)]
        assert len({work.key for work in works}) == 1
        fitted = [choose_tile(gpu, work, lambda work: tile) for work in works]
        assert len({(one.block_k, one.warps) for one in fitted}) == 1
        for one, work in zip(fitted, works, strict=True):
            assert (one.stages - 1) * one.block_k * (one.block_n // 2 + 2 * work.rows) <= gpu.shared
            assert one.block_n >= 16
