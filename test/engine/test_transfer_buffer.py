"""Arrays that travel in one buffer."""

import numpy as np
import torch

from vla_ros.engine.runner import Runner, TransferBuffer

CPU = torch.device("cpu")


def test_arrays_reach_the_device_and_return_unchanged():
    runner, rng = Runner(), np.random.default_rng(0)
    packed = TransferBuffer(
        CPU, ((2, 37), torch.int64), ((2,), torch.int32), ((2, 7), torch.float32), ((1, 1), torch.int64)
    )
    raw, arrays = packed.on_host()
    values = [rng.integers(-9, 9, (2, 37)), np.int32([5, -6]), rng.random((2, 7), np.float32), np.int64([[2**60]])]
    for array, value in zip(arrays, values, strict=True):
        assert array.dtype == value.dtype
        array[...] = value
    runner.upload(packed.buffer, raw)
    assert not any(array.any() for array in packed.on_host()[1])  # new each time
    for tensor, value in zip(packed.tensors, values, strict=True):
        assert np.array_equal(tensor.numpy(), value)
    packed.tensors[1] += 1  # what a kernel writes
    found = packed.split(runner.download(packed.buffer))
    packed.buffer.zero_()  # what was downloaded is a copy
    assert np.array_equal(found[1], values[1] + 1)
    for index in (0, 2, 3):
        assert np.array_equal(found[index], values[index])


def test_every_array_is_aligned_like_an_allocation():
    fields = ((1, 3), torch.int64), ((1,), torch.int32), ((1, 65), torch.float32), ((4,), torch.int64)
    packed = TransferBuffer(CPU, *fields)
    begin = packed.buffer.data_ptr()
    assert [tensor.data_ptr() - begin for tensor in packed.tensors] == [0, 256, 512, 1024]
