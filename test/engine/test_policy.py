"""OpenVLA by the engine against OpenVLA by the reference path, through the policy seam."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from vla_ros.config import Config
from vla_ros.errors import ImageError
from vla_ros.types import Observation
from vla_ros_models.engine.device_errors import EngineMismatchError
from vla_ros_models.engine.ops import Ops
from vla_ros_models.engine.tolerances import TOLERANCES
from vla_ros_models.openvla import OpenVLAOptions
from vla_ros_models.openvla import policy as policy_module
from vla_ros_models.openvla.inference import fit_guard, make_engine
from vla_ros_models.openvla.policy import OpenVLAPolicy, choose_engine


def policy(checkpoint, **options):
    loaded = OpenVLAPolicy(Config(policy=OpenVLAOptions(checkpoint=str(checkpoint), device="cpu", **options)))
    loaded.load()
    return loaded


def ask(loaded, observation):
    return loaded.infer(loaded.start_session(), observation)


def observations(count):
    rng = np.random.default_rng(0)
    words = ("pick up the red cube", "push the green block to the left", "open the drawer")
    image = rng.integers(0, 256, (28, 28, 3), dtype=np.uint8)
    for stamp in range(count):
        if stamp % 3 == 0:
            image = rng.integers(0, 256, (28, 28, 3), dtype=np.uint8)
        yield Observation({"image": image}, words[stamp // 4 % 3], stamp)


@pytest.mark.parametrize("drafts", ["none", "verify", "prefill"])
def test_both_executors_give_the_same_actions(checkpoint, drafts):
    reference, engine = policy(checkpoint, engine="reference"), policy(checkpoint, engine="graph", drafts=drafts)
    accepted = 0
    session = engine.start_session()
    for observation in observations(12):
        expected, answer = ask(reference, observation), engine.infer(session, observation)
        assert np.array_equal(answer.tokens, expected.tokens)
        assert np.array_equal(answer.actions, expected.actions)
        assert answer.info["prompt_tokens"] == expected.info["prompt_tokens"]
        np.testing.assert_allclose(answer.info["logit_margins"], expected.info["logit_margins"], atol=1e-3)
        accepted += answer.info["draft_accepted"] or 0
    assert (accepted > 0) == (drafts != "none")


def test_a_new_instruction_and_a_reset_forget_the_draft(checkpoint):
    engine = policy(checkpoint, engine="graph")
    first, *_, other = observations(5)
    session = engine.start_session()
    assert engine.infer(session, first).info["draft_accepted"] is None
    assert engine.infer(session, first).info["draft_accepted"] == 6
    assert engine.infer(session, other).info["draft_accepted"] is None
    session.reset()
    assert engine.infer(session, other).info["draft_accepted"] is None
    assert ask(engine, other).info["draft_accepted"] is None


@pytest.mark.parametrize("drafts", ["none", "verify", "prefill"])
def test_robots_that_share_a_model_get_what_each_alone_gets(checkpoint, drafts):
    engine, reference = (policy(checkpoint, engine=name, drafts=drafts) for name in ("graph", "reference"))
    seen = list(observations(12))
    robots = [seen[:6], seen[6:]]
    alone = []
    for robot in robots:
        session = engine.start_session()
        alone.append([engine.infer(session, one).tokens.tolist() for one in robot])
        assert alone[-1] == [ask(reference, one).tokens.tolist() for one in robot]
    sessions = [engine.start_session() for _ in robots]
    interleaved = [
        [engine.infer(session, one).tokens.tolist() for session, one in zip(sessions, step, strict=True)]
        for step in zip(*robots, strict=True)
    ]
    assert interleaved == [list(step) for step in zip(*alone, strict=True)]
    sessions = [engine.start_session() for _ in robots]
    blind = replace(seen[0], images={})
    for step, expected in zip(zip(*robots, strict=True), interleaved, strict=True):
        wanted = [*zip(sessions, step, strict=True), (engine.start_session(), blind)]
        *answers, refused = engine.infer_batch(wanted)
        assert [answer.tokens.tolist() for answer in answers] == expected
        assert isinstance(refused, ImageError), "and keeps nobody else from an answer"


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_engine_quantises_by_itself(checkpoint, quantization):
    engine = policy(checkpoint, engine="graph", quantization=quantization, drafts="none")
    for observation in observations(2):
        chunk = ask(engine, observation)
        assert chunk.actions.shape == (1, 7)
        assert np.isfinite(chunk.actions).all()


@pytest.fixture
def wrong_kernel(monkeypatch):
    """Operations whose last product forgets the residual."""

    class Forgetful(Ops):
        def add(self, weights, stream, rows, matrix, positions):
            forgotten = replace(stream, hidden=torch.zeros_like(stream.hidden))
            return super().add(weights, forgotten, rows, matrix, positions)

    monkeypatch.setattr("vla_ros_models.openvla.policy.make_ops", lambda device: Forgetful())


def test_wrong_kernels_are_refused(checkpoint, wrong_kernel):
    with pytest.raises(EngineMismatchError, match=r"kernel for output \(int4 weights, 1 rows\)"):
        policy(checkpoint, engine="graph", quantization="int4")


def test_auto_warns_and_multiplies_in_torch_if_kernels_are_wrong(checkpoint, wrong_kernel, monkeypatch, caplog):
    (observation,) = observations(1)
    monkeypatch.setattr("vla_ros_models.openvla.policy.choose_engine", lambda *_: "graph")
    loaded = policy(checkpoint, quantization="int4", drafts="none")
    assert "torch computes the layers instead of the engine's kernels" in caplog.text
    monkeypatch.undo()
    expected = ask(policy(checkpoint, engine="graph", quantization="int4", drafts="none"), observation)
    assert np.array_equal(ask(loaded, observation).tokens, expected.tokens)


def test_auto_is_the_reference_path_on_a_cpu(checkpoint):
    loaded = policy(checkpoint)
    assert loaded.loaded.engine is None


@pytest.fixture
def wrong_engine(monkeypatch):
    """An engine over weights that are not the checkpoint's: its head's rows are turned upside down."""

    def make(model, *words, **named):
        engine = make_engine(model, *words, **named)
        head = engine.weights.lm_head
        engine.weights = replace(engine.weights, lm_head=replace(head, data=head.data.flip(0).contiguous()))
        return engine

    monkeypatch.setattr(policy_module, "make_engine", make)


def test_an_engine_with_other_tokens_is_refused(checkpoint, wrong_engine):
    with pytest.raises(EngineMismatchError, match="reference path"):
        policy(checkpoint, engine="graph")


def test_auto_warns_and_uses_the_reference_path_if_tokens_differ(checkpoint, wrong_engine, monkeypatch, caplog):
    (observation,) = observations(1)
    expected = ask(policy(checkpoint, engine="reference"), observation)
    monkeypatch.setattr("vla_ros_models.openvla.policy.choose_engine", lambda *_: "graph")
    loaded = policy(checkpoint)
    assert loaded.loaded.engine is None
    assert "the engine failed, using the reference path" in caplog.text
    assert np.array_equal(ask(loaded, observation).tokens, expected.tokens)


class Rounding(Ops):
    """Operations whose products of many rows round coarsely, as libraries for large products may."""

    def add(self, weights, stream, rows, matrix, positions):
        made = super().add(weights, stream, rows, matrix, positions)
        if rows.shape[1] <= 7:
            return made
        shaken = made.hidden * (1 + 0.02 * torch.sin(1e3 * made.hidden))
        return replace(made, hidden=shaken)


def test_a_prefill_that_differs_more_raises_the_guard(tiny, caplog):
    caplog.set_level("INFO")
    samples, prompt = tiny.images(2), tiny.prompt(20)
    exact = tiny.engine()
    fit_guard(exact, samples, prompt)
    assert exact.guard == TOLERANCES[torch.float32].guard
    assert caplog.text == ""
    engine = tiny.engine(ops=Rounding())
    answers = [tiny.ask(engine, sample[None], [prompt])[0].tokens for sample in samples]
    largest = max(engine.draft_error(sample, prompt, draft) for sample in samples for draft in answers)
    assert largest > TOLERANCES[torch.float32].guard
    fit_guard(engine, samples, prompt)
    assert engine.guard == 3 * largest
    assert f"differ by up to {largest:.2g}" in caplog.text
    for sample, tokens in zip(samples, answers, strict=True):  # and measuring has left nothing behind
        assert np.array_equal(tiny.ask(engine, sample[None], [prompt])[0].tokens, tokens)
        assert np.array_equal(tiny.ask(engine, sample[None], [prompt], [tokens])[0].tokens, tokens)


def test_a_draft_that_is_not_accepted_leaves_no_trace_of_the_prefills_rounding(tiny):
    """Rows that the prefill predicted right run again, too: their keys and values are not those of decoding."""
    engine, prompt = tiny.engine(ops=Rounding(), guard=0.0), tiny.prompt(20)
    for image in tiny.images(4):
        plain = tiny.ask(engine, image[None], [prompt])[0]
        draft = plain.tokens.copy()
        draft[5] += 1
        drafted = tiny.ask(engine, image[None], [prompt], [draft])[0]
        assert np.array_equal(drafted.tokens, plain.tokens)
        np.testing.assert_allclose(drafted.margins, plain.margins, atol=1e-4)


def test_an_infinite_guard_is_not_fitted(tiny):
    engine = tiny.engine(ops=Rounding(), drafts="verify")
    fit_guard(engine, tiny.images(2), tiny.prompt(20))
    assert engine.guard == np.inf


def test_the_guard_is_fitted_at_the_start(checkpoint, monkeypatch):
    monkeypatch.setattr("vla_ros_models.engine.token_engine.TokenEngine.draft_error", lambda *_: 0.5)
    assert policy(checkpoint, engine="graph").loaded.engine.guard == 1.5
    assert policy(checkpoint, engine="graph", quantization="int4").loaded.engine.guard == 1.5
    assert (
        policy(checkpoint, engine="graph", self_test=False).loaded.engine.guard == TOLERANCES[torch.float32].guard
    )


@pytest.mark.parametrize(
    ("options", "capability", "triton", "expected"),
    [
        ({}, (9, 0), True, "graph"),
        ({}, (8, 0), True, "graph"),
        ({}, (7, 5), True, "reference"),
        ({}, (9, 0), False, "reference"),
        ({"quantization": "int4"}, (9, 0), True, "graph"),
        ({"quantization": "int8"}, (7, 5), True, "graph"),
        ({"engine": "reference"}, (9, 0), True, "reference"),
        ({"engine": "graph"}, (7, 5), False, "graph"),
    ],
)
def test_auto_takes_the_engine_where_its_kernels_run(options, capability, triton, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if triton else None)
    assert choose_engine(OpenVLAOptions(**options), torch.device("cuda:0")) == expected
