import pytest

from vla_ros.control.reasons import Reason, reason_of
from vla_ros.errors import DeviceLostError, OutOfMemoryError


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), Reason.DEVICE_ERROR),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasSgemm"), Reason.DEVICE_ERROR),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), Reason.INFERENCE_ERROR),
        (DeviceLostError("cuda:0 stopped answering: CUDNN_STATUS_EXECUTION_FAILED"), Reason.DEVICE_ERROR),
        (OutOfMemoryError("out of memory on cuda:0"), Reason.INFERENCE_ERROR),
        (ValueError("image has no pixels"), Reason.INFERENCE_ERROR),
        (KeyError("action"), Reason.INFERENCE_ERROR),
    ],
)
def test_only_errors_of_the_gpu_are_device_errors(error: Exception, reason: Reason) -> None:
    assert reason_of(error) is reason
