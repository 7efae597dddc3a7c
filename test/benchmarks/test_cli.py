"""``vla-ros bench`` and ``python -m benchmarks.models`` as a user runs them, on a CPU."""

import json
from importlib.util import find_spec

import pytest

from benchmarks.models.__main__ import main as models
from vla_ros.cli.main import main
from vla_ros_lab.bench import times

pytest.importorskip("torch", reason="the library torch is not installed (extra 'openvla')")
if find_spec("transformers") is None:  # not imported: that would take each worker two seconds
    pytest.skip("the library transformers is not installed (extra 'bench')", allow_module_level=True)


def test_tiny_bench_measures_everything(tmp_path, capsys):
    file, trace = tmp_path / "bench.json", tmp_path / "trace.json"
    options = ["tiny", "--device", "cpu", "--steps", "2", "--baseline-steps", "1"]
    assert models([*options, "--json", str(file), "--trace", str(trace)]) == 0
    printed = capsys.readouterr()
    for word in (
        "prefill",
        "in and out",
        "320x240",
        "draft accepted",
        "transformers generate",
        "tokens: equal",
        "random weights",
    ):
        assert word in printed.out
    assert "plan: " in printed.err
    result = json.loads(file.read_text())
    assert set(result["total_ms"]) == {"p50", "p99"}
    stages = ("receive", "upload", "preprocess", "vision", "prefill", "decode", "download", "post")
    assert tuple(result["stages_ms"]) == stages
    assert all(value >= 0 for value in result["stages_ms"].values())
    assert 0 < result["in_and_out_ms"] < result["total_ms"]["p50"]
    assert "between_ms" in result
    for name in ("baseline_ms", "speedup", "floor_ms", "memory_gb", "load_s", "first_action_s"):
        assert result[name] > 0
    assert result["tokens_equal"] is True
    assert result["compiled_ms"] is None
    assert "no CUDA graphs on a CPU" in result["compiled_left_out"]
    assert "torch.compile, CUDA graphs: left out" in printed.out
    assert result["token_match"] == 1.0
    assert result["baseline_steps"] == 1
    assert result["drafted_tokens_equal"] is True
    # Its answers are ahead by more than float32's guard, so every right draft is accepted.
    assert (result["accepted_steps"], result["accepted_share"]) == (2, 1.0)
    assert result["accepted_ms"]["p50"] > 0
    assert result["verified_ms"] is None
    assert 0 <= result["draft_acceptance"] <= 1
    assert result["random_weights"] is True
    events = json.loads(trace.read_text())["traceEvents"]
    assert any(event.get("name", "").startswith("aten::") for event in events)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("tiny", "--device", "cuda:77"), "policy.device"),
        (("/no/such/folder", "--device", "cpu"), "expected a checkpoint's folder or one of tiny, "),
        (("tiny", "--trace", "/no/such/folder/trace.json"), "cannot be written"),
    ],
)
def test_wrong_use_ends_with_one_line(words, message, capsys):
    assert models([*words]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


def test_every_step_rests_before_its_time_is_taken(monkeypatch, tmp_path):
    rests, file = [], tmp_path / "bench.json"
    monkeypatch.setattr(times.time, "sleep", rests.append)
    monkeypatch.setattr(times.Stopwatch, "rest", 0.0)
    options = ["tiny-oft", "--device", "cpu", "--steps", "2", "--no-baseline", "--rest-ms", "250"]
    assert models([*options, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert (result["steps"], result["rest_ms"]) == (2, 250.0)
    assert rests.count(0.25) >= 2


@pytest.mark.parametrize(
    ("run", "words", "message"),
    [
        (models, ("tiny", "--frame", "big"), "expected WIDTHxHEIGHT"),
        (models, ("tiny", "--steps", "-3"), "found '-3', expected 0 or more"),
        (models, ("tiny", "--baseline-steps", "-3"), "found '-3', expected 0 or more"),
        (main, ("bench", "--steps", "0"), "found '0', expected 1 or more"),
        (main, ("bench", "--rest-ms", "-3"), "found '-3', expected 0 or more"),
    ],
)
def test_a_wrong_number_is_wrong_usage(run, words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        run([*words])
    assert message in capsys.readouterr().err


def test_bench_times_the_policy_of_a_checkpoint(capsys):
    assert main(["bench", "--checkpoint", "demo-pi", "--config", "demo_pi", "--steps", "1"]) == 0
    text = capsys.readouterr().out
    assert "policy 'pi': 1 steps, 16 action(s) of" in text
    assert "flow" in text
