"""Capturing: where a stage is warmed up and recorded, and what an error or a second thread does to that; transfers.

On a CPU with CUDA's calls replaced by a journal; ``test_cuda.py`` has the same on a GPU.
"""

import threading
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from vla_ros_models.engine.runner import CudaRunner, TransferBuffer

CPU, DEVICE = torch.device("cpu"), torch.device("cuda:0")


class Journal:
    """What was called, in order, and on which stream."""

    def __init__(self, monkeypatch):
        self.calls = []
        self.current = "default"
        self.streams = 0
        monkeypatch.setattr(torch.cuda, "Stream", self._new_stream)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", self._new_graph)
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: None)
        monkeypatch.setattr(torch.cuda, "stream", self._within)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")

    def _new_stream(self, device, priority=0):
        self.streams += 1
        journal, name = self, f"stream {self.streams}"

        class Stream:
            def wait_stream(self, other):
                journal.calls.append((name, f"waits for {other}"))

            def synchronize(self):
                journal.calls.append((name, "is waited for"))

            def __str__(self):
                return name

        return Stream()

    @contextmanager
    def _within(self, stream):
        before, self.current = self.current, str(stream)
        try:
            yield
        finally:
            self.current = before

    def _new_graph(self):
        journal = self

        class Graph:
            def capture_begin(self, pool, capture_error_mode):
                assert (pool, capture_error_mode) == ("pool", "thread_local")
                journal.calls.append((journal.current, "records"))

            def capture_end(self):
                journal.calls.append((journal.current, "has recorded"))

            def replay(self):
                journal.calls.append((journal.current, "replays"))

        return Graph()

    def stage(self):
        self.calls.append((self.current, "stage"))


@pytest.fixture
def journal(monkeypatch):
    return Journal(monkeypatch)


WARM = [("stream 2", "waits for default"), *[("stream 2", "stage")] * 3, ("stream 2", "is waited for")]
RECORDED = [("stream 3", "records"), ("stream 3", "stage"), ("stream 3", "has recorded")]


def test_every_capture_warms_up_on_one_stream_and_records_on_another(journal):
    runner = CudaRunner(DEVICE)
    journal.calls.clear()
    graphs = [runner.capture(journal.stage) for _ in range(20)]
    assert journal.calls == (WARM + RECORDED) * 20
    assert journal.streams == 3
    journal.calls.clear()
    with runner.stream():
        graphs[0]()
    assert journal.calls == [("stream 1", "replays")]


def test_two_threads_capture_one_after_the_other(journal):
    runner, inside, most = CudaRunner(DEVICE), [], []

    def stage():
        inside.append(1)
        most.append(len(inside))
        threading.Event().wait(0.002)  # let the others come
        inside.pop()

    threads = [threading.Thread(target=lambda: [runner.capture(stage) for _ in range(5)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(most) == 60
    assert max(most) == 1


@pytest.mark.parametrize("run", [2, 3], ids=["warming up", "recording"])
def test_a_stage_that_fails_leaves_the_next_capture_alone(journal, run):
    runner, runs = CudaRunner(DEVICE), []

    def stage():
        runs.append(1)
        if len(runs) == run + 1:
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        runner.capture(stage)
    said = [call for _, call in journal.calls]
    assert said.count("records") == said.count("has recorded") == (run == 3)
    journal.calls.clear()
    runner.capture(journal.stage)
    assert journal.calls == WARM + RECORDED


@pytest.mark.parametrize("shape", [(1, 720, 1280, 3), (1, 1, 1, 1), (1, 2**10, 2**10, 1), (1, 7, 150_001, 1), (5,)])
@pytest.mark.parametrize("how", ["as it is", "read only", "with a gap", "another type"])
def test_large_arrays_are_uploaded_in_chunks(journal, monkeypatch, shape, how):
    runner, sizes = CudaRunner(DEVICE), []
    staging, target = (torch.zeros(shape, dtype=torch.uint8) for _ in range(2))
    monkeypatch.setattr(runner, "_staging", lambda tensor, direction: staging)
    copy = torch.Tensor.copy_

    def journaled(to, source, non_blocking=False):
        assert non_blocking
        sizes.append(to.numel())
        return copy(to, source)

    monkeypatch.setattr(torch.Tensor, "copy_", journaled)
    source = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    if how == "read only":
        source.flags.writeable = False
    if how == "with a gap":  # as rows with padding are
        source = np.concatenate([source, source], axis=-1)[..., : shape[-1]]
    runner.upload(target, source if how != "another type" else source.astype(bool))
    assert np.array_equal(target.numpy(), source if how != "another type" else source.astype(bool))
    assert sum(sizes) == target.numel()
    if how in ("as it is", "read only"):
        assert max(sizes) <= 2**20
        assert len(sizes) == -(-target.numel() // 2**20)


@pytest.mark.parametrize("how", ["as it is", "read only", "with a gap", "another type"])
def test_page_locked_memory_is_uploaded_by_one_copy_of_the_device(journal, monkeypatch, how):
    runner, target = CudaRunner(DEVICE), torch.zeros(720, 1280, 3, dtype=torch.uint8)
    source = np.random.default_rng(0).integers(0, 256, (720, 1280, 3), dtype=np.uint8)
    source.flags.writeable = how != "read only"
    source = {"with a gap": source[::-1], "another type": source > 99}.get(how, source)
    staged, copies, copy = [], [], torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    monkeypatch.setattr(runner, "_staging", lambda tensor, way: staged.append(way) or torch.zeros_like(tensor))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *given, **how: copies.append(how) or copy(*given))
    runner.upload(target, source)
    assert np.array_equal(target.numpy(), source)
    assert (staged, copies[:1]) == ([] if how == "as it is" else ["up"], [{"non_blocking": True}])
    assert len(copies) == 1 or staged


def test_a_camera_frame_without_the_batch_axis_is_uploaded_whole(journal, monkeypatch):
    runner = CudaRunner(DEVICE)
    staging, target = (torch.zeros((1, 720, 1280, 3), dtype=torch.uint8) for _ in range(2))
    monkeypatch.setattr(runner, "_staging", lambda tensor, direction: staging)
    source = np.random.default_rng(0).integers(0, 256, (720, 1280, 3), dtype=np.uint8)
    for frame in (source, source[::-1]):
        runner.upload(target, frame)
        assert np.array_equal(target[0].numpy(), frame)


def test_arrays_reach_the_device_and_return_unchanged():
    rng = np.random.default_rng(0)
    packed = TransferBuffer(
        CPU, ((2, 37), torch.int64), ((2,), torch.int32), ((2, 7), torch.float32), ((1, 1), torch.int64)
    )
    values = [rng.integers(-9, 9, (2, 37)), np.int32([5, -6]), rng.random((2, 7), np.float32), np.int64([[2**60]])]
    for array, value in zip(packed.cleared(), values, strict=True):
        assert array.dtype == value.dtype
        array[...] = value
    packed.load()
    assert not any(array.any() for array in packed.cleared())  # each time
    for tensor, value in zip(packed.tensors, values, strict=True):
        assert np.array_equal(tensor.numpy(), value)
    packed.tensors[1] += 1  # what a kernel writes
    packed.store()
    packed.buffer.zero_()  # the host has a copy
    assert np.array_equal(packed.arrays[1], values[1] + 1)
    for index in (0, 2, 3):
        assert np.array_equal(packed.arrays[index], values[index])


def test_every_array_is_aligned_like_an_allocation():
    fields = ((1, 3), torch.int64), ((1,), torch.int32), ((1, 65), torch.float32), ((4,), torch.int64)
    packed = TransferBuffer(CPU, *fields)
    begin = packed.buffer.data_ptr()
    assert [tensor.data_ptr() - begin for tensor in packed.tensors] == [0, 256, 512, 1024]
