"""Which pairs are checked: neighbours, hands, sampled pairs, SRDF, obstacles, several arms."""

from pathlib import Path

import numpy as np
import pytest
from tiny_robot import ARM, options, world_of, write

from vla_ros.cli.main import main
from vla_ros.collision.checker import Checker, Margins
from vla_ros.collision.pairs import sampled_pairs
from vla_ros.collision.world import make_world, read_srdf, without, write_srdf
from vla_ros.config import build
from vla_ros.errors import ConfigError
from vla_ros.kinematics.solver import Kinematics


def names_of(world) -> set[tuple[str, str]]:  # type: ignore[no-untyped-def]
    return {tuple(sorted((world.bodies[i].name, world.bodies[j].name))) for i, j in world.pairs}


def test_neighbours_and_the_parts_of_a_hand_are_not_checked(tmp_path: Path) -> None:
    world = world_of(tmp_path)
    assert names_of(world) == {
        ("base", "lower"), ("base", "hand"), ("base", "finger"), ("base", "thumb"),
        ("hand", "upper"), ("finger", "upper"), ("thumb", "upper"), ("finger", "lower"), ("lower", "thumb"),
    }  # fmt: skip
    assert world.unchecked[("finger", "thumb")] == "parts of a hand"
    assert [body.name for body in world.bodies if body.is_tip] == ["finger", "thumb"]


def test_sampling_finds_pairs_that_are_never_or_always_near_and_an_srdf_keeps_them(tmp_path: Path) -> None:
    world = world_of(tmp_path)
    found, near = sampled_pairs(world, 0.01)
    assert not near
    assert found[("finger", "lower")] in ("always near", "never near")
    assert ("base", "lower") not in found, "the lower link can touch the base"
    kept = without(world, found)
    path = tmp_path / "tiny.srdf"
    path.write_text(write_srdf(kept))
    again = without(world, *read_srdf(path))
    assert again.pairs == kept.pairs
    assert len(kept.pairs) < len(world.pairs)


WHEEL = """
  <link name="axle"><collision><origin xyz="0.1 0 0"/>
    <geometry><sphere radius="0.005"/></geometry></collision></link>
  <link name="wheel"><collision><origin xyz="0.004 0 0"/>
    <geometry><sphere radius="0.01"/></geometry></collision></link>
  <joint name="x" type="continuous"><parent link="base"/><child link="axle"/><origin xyz="0.0735 0 0"/>
    <axis xyz="0 0 1"/><limit velocity="2" effort="1"/></joint>
  <joint name="y" type="continuous"><parent link="axle"/><child link="wheel"/>
    <axis xyz="0 0 1"/><limit velocity="2" effort="1"/></joint>
</robot>"""


def test_links_that_are_near_everywhere_and_never_touch_are_not_checked(tmp_path: Path) -> None:
    """An eccentric wheel is 9.5 to 17.5 mm from the base, so that it is below the hold distance somewhere."""
    world = world_of(tmp_path, ARM.replace("</robot>", WHEEL))
    unchecked, near = sampled_pairs(world, 0.01)
    assert (unchecked["base", "wheel"], near) == ("never touch", set())
    assert ("base", "wheel") in without(world, unchecked).unchecked


def test_links_that_are_near_everywhere_and_can_touch_slow_nothing_and_hold(tmp_path: Path) -> None:
    """The wheel reaches into the base: 16 mm apart at most, 2 mm deep at least."""
    world = world_of(tmp_path, ARM.replace("</robot>", WHEEL.replace('"0.004 0 0"', '"0.0155 0 0"')))
    unchecked, near = sampled_pairs(world, 0.01)
    assert near == {("base", "wheel")}
    path = tmp_path / "wheel.srdf"
    path.write_text(write_srdf(without(world, unchecked, near)))
    assert read_srdf(path)[1] == near
    checker, margins = Checker(without(world, *read_srdf(path))), Margins(0.01, 0.05, 0.002)
    turn = np.zeros((2, len(world.tree.names)))
    column = world.tree.names.index("y")
    for end, share, forbidden in ((1.0, 1.0, False), (2.5, 1.0, True)):
        turn[1, column] = end
        found = checker.check(turn, margins)
        assert (found.share, found.forbidden, found.bodies) == (share, forbidden, ("base", "wheel"))


def test_a_command_writes_the_pairs_that_are_not_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "demo.srdf"
    demo = ["run", "--config", "demo", "-p", "policy.name:=expert", "--srdf", str(path)]
    check = ["-p", "collision.check:=true", "-p", "collision.deceleration:=20.0"]
    assert main([*demo, *check]) == 0
    (written, near), text = read_srdf(path), capsys.readouterr().out
    assert "neighbours" in written.values()
    assert f"{len(written)} not;" in text
    again = tmp_path / "again.srdf"
    assert main([*demo[:-1], str(again), *check, "-p", f"collision.srdf:={path}"]) == 0
    assert read_srdf(again) == (written, near)
    capsys.readouterr()
    assert main(demo) != 0
    assert "collision.check is false" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "match"), [("<robot", "is not XML"), ("<sdf/>", "expected <robot>"), (None, "cannot be read")]
)
def test_an_srdf_that_cannot_be_used_is_named(tmp_path: Path, text: str | None, match: str) -> None:
    path = tmp_path / "bad.srdf"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=f"bad.srdf.*{match}"):
        read_srdf(path)


def test_obstacles_have_a_shape_a_place_and_a_frame(tmp_path: Path) -> None:
    world = world_of(
        tmp_path,
        obstacles=[
            "floor = plane at 0 0 -0.2 support",
            "wall = box 0.2 2 2 at 0.6 0 0",
            "post = cylinder 0.05 1 at 0 -0.5 0.5",
            "ball = sphere 0.1 at 0 0.5 1.5 in base",
            "shield = box 0.02 0.2 0.2 at 0.2 0 0.25 0 0 0 in upper",
        ],
    )
    distances = {}
    q = np.zeros(5)
    for pair, (i, j) in enumerate(world.pairs):
        key = tuple(sorted((world.bodies[i].name, world.bodies[j].name)))
        distances[key] = Checker(world).distances(pair, q[None], 9.0)[0]
    assert distances[("floor", "upper")] == pytest.approx(0.2 + 0.1 + 0.1)
    assert distances[("upper", "wall")] == pytest.approx(0.5 - 0.03)
    assert distances[("post", "upper")] == pytest.approx(0.5 - 0.05 - 0.03, abs=1e-5)
    assert ("shield", "upper") not in distances, "it moves with the link"
    assert ("base", "shield") in distances
    assert ("base", "floor") not in distances, "neither moves"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("floor", "expected each as NAME"),
        ("a = box 1 1", "expected each as NAME"),
        ("a = sphere -1", "expected each as NAME"),
        ("a = box 1 1 1 at 0 0", "expected each as NAME"),
        ("a = mesh", "expected each as NAME"),
        ("a = box 1 1 1 in nowhere", "frame 'nowhere', which is no link"),
        ("a = mesh /nowhere/thing.stl", "thing.stl"),
    ],
)
def test_an_obstacle_that_is_not_understood_is_refused(tmp_path: Path, text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        world_of(tmp_path, obstacles=[text])


def test_the_check_refuses_to_start_without_a_deceleration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"collision\.deceleration: found 0"):
        options(write(tmp_path), deceleration=0.0)


def two_arms(folder: Path, **mounts: list[float]):  # type: ignore[no-untyped-def]
    path = write(folder, ARM)
    values = {
        "robot.arms": ["left", "right"], "robot.urdf": str(path), "robot.joint_names": ["a", "b", "c"],
        "robot.tip_frame": "tip", "collision.check": True, "collision.deceleration": 5.0,
    }  # fmt: skip
    for name in ("left", "right"):
        values |= {f"{name}.command": f"/{name}", f"{name}.joint_states": f"/{name}/joints"}
    values |= {f"{name}.mount": place for name, place in mounts.items()}
    chain = Kinematics.from_urdf(str(path), ("a", "b", "c"), "", "tip")
    return make_world(build(values), {"left": chain, "right": chain})


def test_two_arms_of_one_urdf_are_mounted_and_checked_against_each_other(tmp_path: Path) -> None:
    world = two_arms(tmp_path, left=[0, 0.5, 0, 0, 0, 0], right=[0, -0.5, 0, 0, 0, 3.1415926535])
    assert ("left/lower", "right/lower") in names_of(world)
    assert ("left/base", "right/upper") in names_of(world)
    [pair] = [
        number for number, (i, j) in enumerate(world.pairs)
        if {world.bodies[i].name, world.bodies[j].name} == {"left/upper", "right/upper"}
    ]  # fmt: skip
    assert Checker(world).distances(pair, np.zeros((1, 10)), 9.0)[0] == pytest.approx(1.0 - 0.06)


def test_two_arms_without_mounts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"collision\.mount: not set for right"):
        two_arms(tmp_path, left=[0, 0.5, 0, 0, 0, 0])


def test_two_arms_in_one_urdf_need_no_mount() -> None:
    values = {
        "robot.arms": ["left", "right"], "robot.urdf": "demo_two_arms", "collision.check": True,
        "collision.deceleration": 5.0,
    }  # fmt: skip
    chains = {}
    for name in ("left", "right"):
        values |= {
            f"{name}.command": f"/{name}", f"{name}.tip_frame": f"{name}_tool",
            f"{name}.joint_names": [f"{name}_joint_{number}" for number in range(1, 8)],
        }  # fmt: skip
        chains[name] = Kinematics.from_urdf("demo_two_arms", values[f"{name}.joint_names"], "", f"{name}_tool")
    world = make_world(build(values), chains)
    assert world is not None
    assert ("left_link_4", "right_link_4") in names_of(world)
    assert ("left_base_link", "right_link_1") in names_of(world)
    assert len(world.tree.names) == 18
