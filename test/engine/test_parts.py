"""The engine's parts without a model: drafts, prompt lengths, graphs, frames, quantised weights."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_ros.errors import ConfigError
from vla_ros_models.engine.drafts import verify_all, verify_draft
from vla_ros_models.engine.graph_engine import Buckets, GraphCache
from vla_ros_models.engine.tile_configs import GEMM_TILES, GPUS, TUNED_FOR, Work, choose_tile


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
        return verify_draft(draft, (predictions, [1.0] * count), 0.5)

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

    settled = verify_all([start(i, *observation) for i, observation in enumerate(observations)], verify)
    for one, tokens in zip(settled, expected, strict=True):
        assert list(one.tokens) == tokens
        assert one.passes <= count - 1
        assert one.accepted == count - 1 - one.passes
    assert results.get("passes", 0) == max(one.passes for one in settled)


@pytest.mark.parametrize(
    ("draft", "margins", "fed"),
    [
        ([3, 4, 5], [0.0, 1.0, 9.0, 9.0], None),  # as a whole; the first token needs no margin
        ([3, 4, 5], [9.0, 9.0, 0.9, 9.0], [3, 4, 5]),
        ([3, 4, 5], [9.0, float("nan"), 9.0, 9.0], [3, 4, 5]),
        ([3, 0, 5], [9.0, 9.0, 9.0, 9.0], [3, 4, 5]),  # the predictions are better guesses than the draft,
        ([3, 0, 5], [9.0, 0.9, 9.0, 9.0], [3, 0, 5]),  # except near-ties
    ],
)
def test_a_prefill_accepts_a_draft_as_a_whole_or_all_rows_run_again(draft, margins, fed):
    generator = verify_draft(draft, ([3, 4, 5, 6], margins), 1.0)
    if fed is None:
        with pytest.raises(StopIteration) as end:
            next(generator)
        assert (end.value.value.tokens, end.value.value.passes) == ((3, 4, 5, 6), 0)
    else:
        assert next(generator) == (fed, 0)


def test_buckets():
    buckets = Buckets.up_to(patches=256, answer=7, max_positions=2048)
    assert buckets.lengths[:3] == (288, 320, 352)
    assert buckets.lengths[-1] == 2041
    assert buckets.choose(26) == 288  # 256 + 26 + 6
    assert buckets.choose(27) == 320
    assert buckets.choose(26, (320, 640)) == 320
    assert buckets.choose(500, (320, 640)) is None
    assert buckets.text(288) == 32
    longest = 2041 - 256 - 6
    assert buckets.require(longest) == 2041
    with pytest.raises(ConfigError, match=f"has room for {longest}"):
        buckets.require(longest + 1)
    with pytest.raises(ConfigError, match="too few"):
        Buckets.up_to(256, 7, 200)


BUCKETS = Buckets.up_to(4, 7, 200)


def test_stages_run_without_graphs_during_a_capture():
    gate, built = threading.Event(), []

    def build(length):
        built.append(length)
        return {"length": length, "ready": False}

    def prepare(program):
        assert gate.wait(30)
        program["ready"] = True

    graphs = GraphCache(BUCKETS, build, prepare)
    first = graphs.take(10)
    assert first == {"length": 32, "ready": False}
    assert graphs.take(10) is first  # not a new one at each step
    gate.set()
    assert graphs.wait(30)
    ready = graphs.take(10)
    assert ready == {"length": 32, "ready": True}
    assert ready is not first  # the one that answered meanwhile had buffers of its own
    gate.clear()
    assert graphs.take(40)["length"] == 64
    gate.set()
    assert graphs.wait(30)
    assert graphs.ready == (32, 64)
    graphs.close()
    assert graphs.ready == ()


def test_longer_graphs_run_a_prompt_during_a_capture():
    gate = threading.Event()
    graphs = GraphCache(BUCKETS, lambda length: length, lambda _: None)
    graphs.ensure(96)
    graphs._prepare = lambda _: gate.wait(30)
    assert graphs.take(10) == 96
    gate.set()
    assert graphs.wait(30)
    assert graphs.take(10) == 32


def test_a_length_that_cannot_be_prepared_is_tried_once():
    def prepare(length):
        raise RuntimeError("no capture")

    graphs = GraphCache(BUCKETS, lambda length: length, prepare)
    for _ in range(3):
        assert graphs.take(10) == 32
        assert graphs.wait(30)
    assert str(graphs.failures[32]) == "no capture"
    with pytest.raises(RuntimeError, match="no capture"):
        graphs.ensure(64)


def gemm(kind: str, rows: int, outputs: int, inputs: int) -> Work:
    return Work("gemm", inputs, outputs, kind=kind, rows=rows)


def test_configs_cover_all_rows_and_prefer_measured_ones():
    for rows in (65, 288, 320, 576, 2041):
        for outputs in (4096, 12288, 22016):
            tile = choose_tile(TUNED_FOR, gemm("int8", rows, outputs, 4096))
            assert tile.tail_m == 0 or tile.tail_m >= 16
    for size, tile in GEMM_TILES.items():
        assert choose_tile(TUNED_FOR, gemm(*size)) == tile
    # Elsewhere, and for what was not measured, by reckoning.
    small, large = (
        choose_tile(GPUS["8.0"], gemm("int8", *size)) for size in ((288, 4096, 11008), (576, 22016, 4096))
    )
    assert small.block_m < large.block_m
