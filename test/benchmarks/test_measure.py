"""What a measurement asks, and what its figures are taken over."""

import tracemalloc

import numpy as np
import pytest

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")

import torch

from benchmarks.models.measure import Measurement, run_right_drafts
from benchmarks.models.openvla import render
from benchmarks.models.setup import between
from benchmarks.models.subject import make_prompt, open_subject
from vla_ros.vision.decode import decode_image
from vla_ros_lab.bench.times import collect, make_messages, percentiles
from vla_ros_models.openvla.inference import make_engine


@pytest.fixture(scope="module")
def subject():
    torch.set_num_threads(1)
    return open_subject("tiny", torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def plain(subject):
    """Eight images, and what plain decoding answers."""
    measurement = make_measurement(subject, None)
    times, answers = measurement.run()
    assert len(times["total"]) == len(answers) == 8
    return answers


def make_measurement(subject, guard):
    engine = make_engine(subject.model, 7)
    if guard is not None:
        engine.guard = guard
    prompt = make_prompt(subject.model.architecture, 9)
    return Measurement(subject, engine, make_messages(48, 64), 8, prompt)


def test_messages_all_differ_and_need_the_memory_of_one():
    message = make_messages(61, 49)  # a width that is a multiple of the shift
    frames = {decode_image(message).image.tobytes() for message in map(message, range(500))}
    assert len(frames) == 61 * 49 // 7  # 427; then they begin again
    tracemalloc.start()
    for index in range(200):
        assert message(index) == message(index)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 20 * 61 * 49 * 3


def test_accepted_drafts_are_timed_whatever_their_margins(subject, plain):
    least = sorted(float(answer.margins[1:].min()) for answer in plain)
    for guard, share in ((0.0, 1.0), ((least[3] + least[4]) / 2, 0.5), (1e9, 0.0)):
        measurement = make_measurement(subject, guard)
        found = run_right_drafts(measurement, plain, 8, 1)
        assert found.equal
        assert (len(found.accepted["total"]), found.share) == (8, share)
        assert len(found.verified["total"]) == 8 * (1 - share)
        assert measurement.engine.guard == guard


def test_tokens_that_differ_from_plain_decoding_are_reported(subject, plain):
    wrong = [*plain[:-1], plain[0]]  # the last image's answer is another's
    assert not run_right_drafts(make_measurement(subject, 0.0), wrong, 8, 0).equal


def test_time_between_the_stages():
    stages = (("total", "upload", "vision"), ((10.0, 1.0, 7.0), (11.0, 1.0, 9.0), (9.0, 2.0, 6.0)))
    assert between(collect([dict(zip(stages[0], step, strict=True)) for step in stages[1]])) == 1.0
    assert percentiles(collect([])["total"]) is None


def test_the_table_without_an_accepted_draft():
    result = {
        "model": "m", "machine": "d", "dtype": "bfloat16", "quantization": "none", "steps": 9, "graphs": "graphs",
        "stages_ms": {"vision": 2.0}, "accepted_stages_ms": {}, "between_ms": 0.1, "accepted_ms": None,
        "total_ms": {"p50": 3.0, "p99": 4.0}, "frame": [64, 48], "in_and_out_ms": 1.0, "floor_ms": 2.0,
        "accepted_floor_ms": 1.0, "baseline_ms": None, "bandwidth_gb_per_s": 1.0, "tflops": 1.0, "memory_gb": 1.0,
        "load_s": 1.0, "first_action_s": 1.0, "guard": 0.25, "accepted_steps": 0,
        "verified_steps": 3, "verified_ms": {"p50": 17.5, "p99": 18.0}, "accepted_share": 0.0,
        "draft_acceptance": 0.1, "random_weights": True,
        **{f"{part}_ms": {"p50": 0.5, "p99": 0.75} for part in ("device", "upload", "host", "slot")},
    }  # fmt: skip
    text = render(result)
    assert "accepts 0.0 %, those whose margins are all at least 0.25; the others" in text
    assert "p50 17.500 ms" in text


def test_prompts_have_the_length_that_was_asked_for(subject):
    architecture = subject.model.architecture
    prompt = make_prompt(architecture, 22)
    assert (len(prompt), prompt[0], prompt[-1]) == (22, architecture.llm.bos_token, architecture.empty_token)
    assert np.array_equal(prompt, make_prompt(architecture, 22))
