"""The engine against the reference path: the same tokens, whatever drafts, buckets and batches do."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from vla_ros.errors import ConfigError, DeviceLostError, OutOfMemoryError
from vla_ros.types import RawImage
from vla_ros_models.engine.device_errors import NotFiniteError, is_device_error
from vla_ros_models.engine.drafts import PATIENCE, REST, DraftState
from vla_ros_models.engine.ops import Ops
from vla_ros_models.engine.runner import Runner
from vla_ros_models.engine.token_engine import EngineRequest


def test_tokens_of_200_random_inputs_equal_the_reference(tiny):
    """Plain and with every kind of draft: none, right, wrong from a random place on, of another action."""
    plain, drafted, exact = tiny.engine(drafts="none"), tiny.engine(), tiny.engine(drafts="verify")
    previous, saved = None, 0
    for case in range(200):
        images, prompt = tiny.images(), tiny.prompt(3 + case % 90)
        expected, margins = tiny.reference(images, prompt)
        answer = tiny.ask(plain, images, [prompt])[0]
        assert np.array_equal(answer.tokens, expected), case
        np.testing.assert_allclose(answer.margins, margins, atol=2e-4)
        draft = expected.copy()
        if case % 3 == 1:
            draft[case % 7 :] += 1
        if case % 3 == 2 and previous is not None:
            draft = previous
        result = tiny.ask(drafted, images, [prompt], [draft])[0]
        assert np.array_equal(result.tokens, expected), case
        if case % 4 == 0:
            assert np.array_equal(tiny.ask(exact, images, [prompt], [draft])[0].tokens, expected), case
        saved += result.accepted or 0
        previous = expected
    assert saved > 67 * 6 * 0.9  # a third of the drafts was right


def test_a_right_draft_needs_no_pass_and_a_wrong_one_no_more_than_none(tiny):
    engine = tiny.engine()
    images, prompt = tiny.images(), tiny.prompt(20)
    tokens = tiny.ask(engine, images, [prompt])[0].tokens
    right = tiny.ask(engine, images, [prompt], [tokens])[0]
    assert (right.accepted, right.passes) == (6, 0)
    for place in range(6):
        draft = tokens.copy()
        draft[place] += 1
        partly = tiny.ask(engine, images, [prompt], [draft])[0]
        assert np.array_equal(partly.tokens, tokens)
        assert partly.passes <= 6 - place
        assert partly.accepted == 6 - partly.passes
    last = tokens.copy()
    last[6] += 1  # nothing follows the last token: the draft of it does not matter
    assert tiny.ask(engine, images, [prompt], [last])[0].passes == 0


@pytest.mark.parametrize("options", [{"drafts": "verify"}, {"guard": 1e9}])
def test_a_right_draft_that_the_prefill_does_not_accept_takes_one_pass(tiny, options):
    engine, images, prompt = tiny.engine(**options), tiny.images(), tiny.prompt(20)
    tokens = tiny.ask(engine, images, [prompt])[0].tokens
    right = tiny.ask(engine, images, [prompt], [tokens])[0]
    assert (right.accepted, right.passes) == (5, 1)
    assert np.array_equal(right.tokens, tokens)


@pytest.mark.parametrize("drafts", ["none", "prefill", "verify"])
def test_a_batch_answers_each_observation_as_if_alone(tiny, drafts):
    engine = tiny.engine(drafts=drafts)
    images = tiny.images(5)
    prompts = [tiny.prompt(length) for length in (9, 31, 17, 40, 9)]
    alone = [tiny.ask(engine, images[i : i + 1], [prompts[i]])[0].tokens for i in range(5)]
    for given in ([None] * 5, alone, [alone[0], None, alone[1], alone[3] + 1, alone[4]]):
        together = tiny.ask(engine, images, prompts, given)
        for one, tokens in zip(together, alone, strict=True):
            assert np.array_equal(one.tokens, tokens)


def test_instructions_change_length_from_step_to_step(tiny):
    """What a longer prompt or a rejected draft left in a cache must not show in the next answer."""
    engine = tiny.engine()
    images = tiny.images()
    prompts = [tiny.prompt(length) for length in (60, 5, 33, 5, 61, 90)]
    expected = [tiny.reference(images, prompt)[0] for prompt in prompts]
    for step in range(18):
        case = step % len(prompts)
        answer = tiny.ask(engine, images, [prompts[case]], [expected[step % 5]])[0]
        assert np.array_equal(answer.tokens, expected[case])


def test_quantised_engines_answer_like_the_dequantised_weights(tiny):
    from vla_ros_models.engine.token_engine import TokenEngine
    from vla_ros_models.engine.weights import Layer, dequantize, fuse, quantize

    def exact(layer):
        return Layer.of({m.role: quantize(dequantize(m, torch.float32), "none", m.role) for m in layer.matrices})

    for kind in ("int8", "int4"):
        weights = fuse(tiny.model.language_model, kind)
        engine = tiny.engine(kind)
        plain = replace(weights, layers=tuple(exact(layer) for layer in weights.layers))
        other = TokenEngine(tiny.see, plain, tiny.architecture.patches, engine.options)
        for _ in range(5):
            images, prompt = tiny.images(), tiny.prompt(20)
            tokens = tiny.ask(engine, images, [prompt])[0].tokens
            assert np.array_equal(tokens, tiny.ask(other, images, [prompt])[0].tokens)
            assert np.array_equal(tokens, tiny.ask(engine, images, [prompt], [tokens])[0].tokens)


def test_stages_are_timed(tiny):
    answer = tiny.ask(tiny.engine(), tiny.images(), [tiny.prompt(10)])[0]
    assert list(answer.stages_ms) == ["upload", "vision", "prefill", "decode", "download"]
    assert all(value >= 0 for value in answer.stages_ms.values())


def test_wrong_use_is_refused(tiny):
    with pytest.raises(ConfigError, match=r"policy.drafts: found 'yes'"):
        tiny.engine(drafts="yes")
    mixed = [tiny.images()[0], RawImage(tiny.images()[0])]
    with pytest.raises(ConfigError, match="1 of 2 images are camera images"):
        tiny.ask(tiny.engine(), mixed, [tiny.prompt(10)] * 2)
    with pytest.raises(ConfigError, match=r"policy.instruction: 3000 tokens .* shorten it"):
        tiny.ask(tiny.engine(), tiny.images(), [tiny.prompt(3000)])


@pytest.mark.parametrize("name", ["language_model.lm_head.weight", "projector.fc2.weight"])
def test_nan_in_the_weights_is_an_error_and_no_action(own_tiny, name):
    engine = own_tiny.engine()
    images, prompt = own_tiny.images(), own_tiny.prompt(10)
    own_tiny.ask(engine, images, [prompt])
    with torch.no_grad():
        own_tiny.model.get_parameter(name)[5] = float("nan")
    with pytest.raises(NotFiniteError, match="NaN or Inf"):
        own_tiny.ask(engine, images, [prompt])
    with pytest.raises(NotFiniteError, match="NaN or Inf"):
        own_tiny.ask(engine, images, [prompt], [np.arange(7)])


class Failing(Ops):
    """Operations that fail when told to, as a device does."""

    error: Exception | None = None

    def lm_head(self, weights, stream):
        if self.error is not None:
            raise self.error
        return super().lm_head(weights, stream)


def test_out_of_memory_is_explained_and_asking_again_works(tiny):
    ops = Failing()
    engine = tiny.engine(ops=ops)
    images, prompt = tiny.images(), tiny.prompt(10)
    expected = tiny.ask(engine, images, [prompt])[0].tokens
    ops.error = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    with pytest.raises(OutOfMemoryError, match=r"2.00 GiB.* int8 or int4"):
        tiny.ask(engine, images, [prompt])
    ops.error = None
    assert np.array_equal(tiny.ask(engine, images, [prompt])[0].tokens, expected)


def test_a_lost_device_stays_lost_until_a_new_engine_is_made(tiny):
    ops = Failing()
    engine = tiny.engine(ops=ops)
    images, prompt = tiny.images(), tiny.prompt(10)
    expected = tiny.ask(engine, images, [prompt])[0].tokens
    ops.error = RuntimeError("CUDA error: unspecified launch failure\nCompile with ...")
    with pytest.raises(DeviceLostError, match=r"unspecified launch failure.*The arm holds"):
        tiny.ask(engine, images, [prompt])
    ops.error = None
    with pytest.raises(DeviceLostError):
        tiny.ask(engine, images, [prompt])
    engine.close()
    assert np.array_equal(tiny.ask(tiny.engine(ops=ops), images, [prompt])[0].tokens, expected)


def test_an_error_of_a_capture_does_not_count_as_a_lost_device():
    """It ends the capture; with ``policy.engine: auto`` the reference path answers then."""
    assert is_device_error(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert is_device_error(RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"))
    assert not is_device_error(RuntimeError("CUDA error: operation not permitted when stream is capturing"))
    assert not is_device_error(RuntimeError("CUDA error: operation failed due to a previous error during capture"))


def test_other_errors_are_not_disguised(tiny):
    ops = Failing()
    ops.error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        tiny.ask(tiny.engine(ops=ops), tiny.images(), [tiny.prompt(10)])


class Recorder(Runner):
    """A runner that keeps account of captures, as if there were graphs."""

    graphs = True

    def __init__(self):
        self.captures = 0

    def capture(self, stage):
        for _ in range(3):
            stage()
        self.captures += 1
        return stage


def test_new_prompt_lengths_are_captured_in_the_background(tiny):
    runner = Recorder()
    engine = tiny.engine(runner=runner, drafts="none")
    engine.warm_up([90])
    assert runner.captures == 4
    images = tiny.images()
    for length in (90, 10, 90, 40):  # 10 is answered by the program for 90 at first
        prompt = tiny.prompt(length)
        assert np.array_equal(tiny.ask(engine, images, [prompt])[0].tokens, tiny.reference(images, prompt)[0])
        assert engine._of(1).wait(60)
    assert runner.captures == 12
    engine.close()


def test_a_session_pauses_drafting_after_failures():
    state, tried = DraftState().after([1, 2], None), []
    for _ in range(2 * REST + PATIENCE + 4):
        tried.append(state.offer() is not None)
        state = state.after([1, 2], 0 if tried[-1] else None)
    rests = [False] * REST
    assert tried == [*[True] * PATIENCE, *rests, True, *rests, True, False, False]
    state = DraftState((1, 2), PATIENCE - 1)
    for _ in range(5):
        assert state.offer() == (1, 2)
        state = state.after([1, 2], 3)
    assert DraftState().offer() is None


def test_sessions_of_a_batch_back_off_separately(tiny):
    engine, images, prompts = tiny.engine(guard=1e9), tiny.images(2), [tiny.prompt(20), tiny.prompt(20)]
    tokens = [answer.tokens for answer in tiny.ask(engine, images, prompts)]
    resting = EngineRequest(images[0], prompts[0], DraftState(tuple(tokens[0]), resting=3))
    drafting = EngineRequest(images[1], prompts[1], DraftState(tuple(tokens[1])))
    first, second = engine.answer([resting, drafting])
    assert (first.accepted, first.draft.resting) == (None, 2)
    assert second.accepted is not None
    assert [one.tokens.tolist() for one in (first, second)] == [one.tolist() for one in tokens]
