import numpy as np
import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")

import torch

from benchmarks.shards import plain_torch


def test_plain_pytorch_with_batches_computes_what_it_computes_without():
    plain = plain_torch("tiny-oft", torch.device("cpu"), torch.float32)
    images = torch.randint(0, 256, (2, 2, 224, 224, 3), dtype=torch.uint8, generator=torch.manual_seed(0))
    found = {name: np.array(compute(images)) for name, compute in plain.items()}
    np.testing.assert_allclose(found["batch"], found["single"], atol=1e-4)
    assert np.abs(found["single"][0] - found["single"][1]).max() > 1e-3
