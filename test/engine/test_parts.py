"""The engine's parts without a model: drafts, prompt lengths, programs, frames, quantised weights."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vla_ros.engine import int4
from vla_ros.engine.drafts import agreed, settle_all, settling
from vla_ros.engine.launches import TILED, Launch, choose_tile
from vla_ros.engine.programs import Programs
from vla_ros.engine.shapes import Buckets
from vla_ros.engine.weights import dequantize, quantize_int4, quantize_int8
from vla_ros.errors import ConfigError


def network(tokens):
    """A made-up greedy network: what follows depends on everything before it."""
    value = 17
    for token in tokens:
        value = (value * 31 + token) % 5  # few answers, so that guesses often hit
    return value


def greedy(count, seed):
    tokens = []
    while len(tokens) < count:
        tokens.append(network([seed, *tokens]))
    return tokens


def answers(seed, certain, fed):
    """What the network says after each of ``fed``, behind ``certain`` tokens."""
    return [network([seed, *certain, *fed[: i + 1]]) for i in range(len(fed))]


@given(
    st.integers(1, 9),
    st.lists(
        st.tuples(st.integers(0, 99), st.lists(st.integers(0, 4), min_size=8, max_size=8)), min_size=1, max_size=4
    ),
)
def test_drafts_never_change_the_answer(count, observations):
    """Any draft, any batch: the greedy tokens, in no more passes than decoding takes, each pass for all."""
    results = {}

    def start(index, seed, draft):
        draft = draft[: count - 1]
        predictions = [network([seed]), *answers(seed, [], draft)]
        return settling(draft, (predictions, [1.0] * count), 0.5)

    expected = [greedy(count, seed) for seed, _ in observations]

    def verify(wants):
        replies = []
        for index, want in enumerate(wants):
            if want is None:
                replies.append(([], []))
                continue
            fed, known = want
            assert fed[0] == expected[index][known]  # the newest certain token
            reply = answers(observations[index][0], expected[index][:known], fed)
            replies.append(([*reply, 99], [1.0] * (len(reply) + 1)))  # rows of padding behind it
        results["passes"] = results.get("passes", 0) + 1
        return replies

    settled = settle_all([start(i, *observation) for i, observation in enumerate(observations)], verify)
    for one, tokens in zip(settled, expected, strict=True):
        assert list(one.tokens) == tokens
        assert one.passes <= count - 1
        assert one.accepted == count - 1 - one.passes
    assert results.get("passes", 0) == max(one.passes for one in settled)


def test_low_margins_and_nan_end_a_drafted_row():
    tokens = [3, 4, 5, 6]
    assert agreed([3, 4, 5], (tokens, [9.0, 9.0, 9.0, 9.0]), 1.0) == 4
    assert agreed([3, 4, 5], (tokens, [0.0, 9.0, 0.9, 9.0]), 1.0) == 2
    assert agreed([3, 4, 5], (tokens, [9.0, float("nan"), 9.0, 9.0]), 1.0) == 1
    assert agreed([3, 0, 5], (tokens, [9.0] * 4), 1.0) == 2
    assert agreed([], (tokens, [9.0] * 4)) == 1


def test_buckets():
    buckets = Buckets.up_to(patches=256, answer=7, max_positions=2048)
    assert buckets.lengths[:3] == (288, 320, 352)
    assert buckets.lengths[-1] == 2041
    assert buckets.choose(26) == 288  # 256 + 26 + 6
    assert buckets.choose(27) == 320
    assert buckets.choose(26, (640, 320)) == 320
    assert buckets.choose(500, (640, 320)) is None
    assert buckets.text(288) == 32
    longest = 2041 - 256 - 6
    assert buckets.require(longest) == 2041
    with pytest.raises(ConfigError, match=f"has room for {longest}"):
        buckets.require(longest + 1)
    with pytest.raises(ConfigError, match="too few"):
        Buckets.up_to(256, 7, 200)


BUCKETS = Buckets.up_to(4, 7, 200)


def test_programs_answer_while_others_are_prepared():
    gate, built = threading.Event(), []

    def build(length):
        built.append(length)
        return {"length": length, "ready": False}

    def prepare(program):
        assert gate.wait(30)
        program["ready"] = True

    programs = Programs(BUCKETS, build, prepare)
    first = programs.take(10)
    assert first == {"length": 32, "ready": False}
    assert programs.take(10) is first  # not a new one at each step
    gate.set()
    assert programs.wait(30)
    ready = programs.take(10)
    assert ready == {"length": 32, "ready": True}
    assert ready is not first  # the one that answered meanwhile had buffers of its own
    gate.clear()
    assert programs.take(40)["length"] == 64
    gate.set()
    assert programs.wait(30)
    assert programs.ready == (32, 64)
    programs.close()
    assert programs.ready == ()


def test_a_longer_ready_program_is_better_than_an_unprepared_one():
    gate = threading.Event()
    programs = Programs(BUCKETS, lambda length: length, lambda _: None)
    programs.ensure(96)
    programs._prepare = lambda _: gate.wait(30)
    assert programs.take(10) == 96
    gate.set()
    assert programs.wait(30)
    assert programs.take(10) == 32


def test_a_length_that_cannot_be_prepared_is_tried_once():
    def prepare(length):
        raise RuntimeError("no capture")

    programs = Programs(BUCKETS, lambda length: length, prepare)
    for _ in range(3):
        assert programs.take(10) == 32
        assert programs.wait(30)
    assert str(programs.failures[32]) == "no capture"
    with pytest.raises(RuntimeError, match="no capture"):
        programs.ensure(64)


@pytest.mark.parametrize(("quantize", "bound"), [(quantize_int8, 0.012), (quantize_int4, 0.14)])
def test_quantised_weights_are_near(quantize, bound):
    weight = torch.randn(48, 256, generator=torch.Generator().manual_seed(0))
    weight[3] *= 100  # an outlier row must not cost the others anything
    back = dequantize(quantize(weight), torch.float32)
    assert ((back - weight).norm(dim=1) / weight.norm(dim=1)).max() < bound


def test_int4_keeps_zero_and_equals_its_definition():
    """Against the same quantiser written out weight by weight, with a width that is no multiple of a group."""
    weight = torch.randn(32, 300, generator=torch.Generator().manual_seed(0))
    weight[:, ::7] = 0.0
    weight[5] = weight[5].abs()  # zero point 0
    weight[6, :128] = 0.0
    matrix = quantize_int4(weight)
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


@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**32))
def test_int4_words_hold_what_was_packed(units, groups, seed):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 16, (8 * units, 128 * groups), generator=generator, dtype=torch.uint8)
    assert torch.equal(int4.unpack(int4.pack(numbers)), numbers)


def test_int4_words_lie_where_the_matrix_units_expect_them():
    """Lane 4 g + t owns four words; nibble j of word 2 h + e is input 16 j + 8 h + 2 t + e of output g."""
    for output, number in ((3, 0), (12, 1), (15, 127), (8, 77), (0, 90)):
        numbers = torch.zeros(16, 256, dtype=torch.uint8)
        numbers[output, 128 + number] = 15
        j, h, t, e = number // 16, number // 8 % 2, number // 2 % 4, number % 2
        words = int4.pack(numbers)
        assert words.shape == (2, 2, 128)
        at = words.nonzero().tolist()
        assert at == [[output // 8, 1, 4 * (4 * (output % 8) + t) + 2 * h + e]]
        assert (words[tuple(at[0])].item() >> 4 * j) & 15 == 15


def test_int4_refuses_what_its_kernels_cannot_cut():
    with pytest.raises(ConfigError, match=r"multiples of 16, found a weight \[24, 64\]"):
        quantize_int4(torch.zeros(24, 64))


def test_int4_sums_in_the_same_order_whatever_the_rows():
    """What a step takes decides the order; it may depend on the device, never on the number of rows."""
    launch = Launch(16, 2048, 8, 6)
    for shared in (96_000, 223_000):

        def step_bytes(one, rows):
            return one.inputs * (one.outputs // 2 + 2 * rows)

        fitted = {rows: launch.fit_int4(4096, step_bytes, rows, shared) for rows in (8, 16, 32)}
        assert len({(one.inputs, one.warps) for one in fitted.values()}) == 1
        assert all((one.stages - 1) * step_bytes(one, rows) <= shared for rows, one in fitted.items())
        assert all(one.outputs >= 8 for one in fitted.values())


def test_tiles_cover_all_rows_and_measured_ones_win(monkeypatch):
    for rows in (65, 288, 320, 576, 2041):
        for outputs in (4096, 12288, 22016):
            tile = choose_tile(rows, outputs, 4096, 132)
            assert tile.tail == 0 or tile.tail >= 16
    assert choose_tile(288, 4096, 11008, 132).rows < choose_tile(576, 22016, 4096, 132).rows
    monkeypatch.setitem(TILED, (288, 4096, 4096), None)
    assert choose_tile(288, 4096, 4096, 132) is None
