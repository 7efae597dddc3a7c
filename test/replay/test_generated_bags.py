"""Replay, export and the libraries mcap and rosbags agree on generated bags (``fuzz/bags.py`` checks many more)."""

import random
from collections import Counter
from dataclasses import replace

import pytest

pytest.importorskip("av")
pytest.importorskip("pyarrow")
pytest.importorskip("mcap")
pytest.importorskip("rosbags")

from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from mcap.reader import make_reader

from fuzz import bags

PLANS = st.builds(
    bags.Plan,
    storage=st.sampled_from(bags.STORAGES),
    times=st.sampled_from(bags.TIMES),
    split=st.sampled_from(bags.SPLITS),
    order=st.sampled_from(bags.ORDERS),
    damage=st.sampled_from(bags.DAMAGES),
    metadata=st.sampled_from(bags.METADATA),
    duplicates=st.booleans(),
)


OUTLIERS = bags.Plan("mcap", "outlier", "one file", "in order", "none", "right", duplicates=False)


# A seed cannot be made simpler, and each attempt plays and exports a bag.
@settings(max_examples=15, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(plan=PLANS, seed=st.integers(0, 10**6))
@example(plan=OUTLIERS, seed=157)  # an image that arrived an hour late, with a joint state too old for it
def test_messages_order_and_pairing_are_those_of_the_rules(tmp_path_factory, plan, seed):
    folder = tmp_path_factory.mktemp("generated") / "bag"
    noted: list[str] = []
    assert bags.check(bags.Generated(folder, plan, random.Random(seed)), noted.append, Counter()) == []


@pytest.mark.parametrize("storage", ["mcap", "mcap zstd"])
@pytest.mark.parametrize("of_records", [False, True])
def test_a_chunk_of_which_one_length_is_damaged_is_read_whole(tmp_path, storage, of_records):
    """Others have it, too: the index the chunk's, the chunk its records'. The library mcap read more messages."""
    plan = bags.Plan(storage, "regular", "one file", "in order", "none", "right", duplicates=False)
    bag = bags.Generated(tmp_path / "bag", plan, random.Random(3))
    with bag.paths[0].open("rb") as file:
        index = make_reader(file).get_summary().chunk_indexes[0]
    data, at = bytearray(bag.paths[0].read_bytes()), index.chunk_start_offset + 1
    if of_records:
        at += index.chunk_length - 9 - index.compressed_size
    wrong = 2 * index.compressed_size if of_records else index.chunk_length // 2
    data[at : at + 8] = wrong.to_bytes(8, "little")
    bag.paths[0].write_bytes(data)
    assert bags.check(bag, list[str]().append, Counter()) == []


@pytest.mark.parametrize("lost", [1, 3, 4])
def test_a_message_whose_last_bytes_were_lost_is_not_read(tmp_path, lost):
    """Zeros follow, so that its record looks whole: an image with a black last pixel was read."""
    plan = bags.Plan("mcap without chunks", "regular", "one file", "in order", "none", "right", duplicates=False)
    bag = bags.Generated(tmp_path / "bag", plan, random.Random(3))
    bag.plan = replace(plan, damage="zeros at the end")
    whole, (path,) = [data for _, topic, data in bag.written if topic == bags.CAMERA][-1], bag.paths
    content = path.read_bytes()
    path.write_bytes(content[: content.index(whole) + len(whole) - lost] + bytes(1_000_000))
    assert bags.check(bag, list[str]().append, Counter()) == []


def test_the_rules_would_notice_a_wrong_order(tmp_path):
    """The check itself: images that are swapped in the bag's reading are other images at a frame."""
    plan = bags.Plan("mcap", "regular", "one file", "in order", "none", "right", duplicates=False)
    bag = bags.Generated(tmp_path / "bag", plan, random.Random(3))
    compared: Counter[str] = Counter()
    assert bags.check(bag, list[str]().append, compared) == []
    assert min(compared.values()) >= 8
    first, second = (
        data for _, topic, data in bag.written if topic == bags.CAMERA and bag.meanings[data].number in (3, 4)
    )
    bag.meanings[first], bag.meanings[second] = bag.meanings[second], bag.meanings[first]
    problems = bags.check(bag, list[str]().append, compared)
    wrong = ["replay", "export --clock received"]
    assert [problem.split(":")[0] for problem in problems] == wrong, "on the clock of stamps, they are swapped, too"
