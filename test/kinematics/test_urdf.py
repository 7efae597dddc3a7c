"""URDFs as people publish them, and files that are none."""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from vla_ros.errors import ConfigError
from vla_ros.kinematics.solver import Kinematics

LIMIT = '<limit lower="-2" upper="2" velocity="2" effort="1"/>'


def link(*names: str) -> str:
    return "".join(f'<link name="{name}"/>' for name in names)


def joint(
    name: str, parent: str, child: str, kind: str = "revolute", inner: str = LIMIT, axis: str = "0 0 1"
) -> str:
    return (
        f'<joint name="{name}" type="{kind}"><origin xyz="0.1 0 0.2"/><parent link="{parent}"/>'
        f'<child link="{child}"/><axis xyz="{axis}"/>{inner}</joint>'
    )


def robot(*parts: str, attributes: str = "") -> str:
    return f'<robot name="r"{attributes}>{"".join(parts)}</robot>'


ARM = (link("base", "a", "b"), joint("j1", "base", "a"), joint("j2", "a", "b", axis="0 1 0"))


@pytest.fixture
def read(tmp_path: Path):
    def read(text: str | bytes, **options: object) -> Kinematics:
        path = tmp_path / "arm.urdf"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return Kinematics.from_urdf(str(path), **options)  # type: ignore[arg-type]

    return read


@pytest.mark.parametrize(
    "text",
    [
        robot(
            *ARM, '<drake:collision_filter_group name="g"><drake:member link="a"/></drake:collision_filter_group>'
        ),
        robot(*ARM).replace("<limit ", '<limit drake:acceleration="2.5" ', 1),
        robot(*ARM, '<gazebo reference="a"><sensor:camera name="c"/></gazebo>', "<controller:gazebo_mechanism/>"),
        robot(*ARM, attributes=' xmlns:xacro="http://www.ros.org/wiki/xacro"'),  # as xacro itself leaves it
        "\n  <?xml version='1.0'?>\n" + robot(*ARM),
        robot(*ARM, "<gazebo><plugin><namespace>${ns} $(find x)</namespace></plugin></gazebo>"),
        robot('<property name="friction" value="1"/>', *ARM),  # left over in what xacro wrote
        robot(*ARM, '<transmission name="t"><joint name="j1"/><actuator name="m"/></transmission>'),
        robot(*ARM).replace(
            '<link name="a"/>', '<link name="a"><visual><geometry><box size="x"/></geometry></visual></link>'
        ),
        b'<?xml version="1.0" encoding="ISO-8859-1"?>' + robot("<!-- \xfc -->", *ARM).encode("latin-1"),
    ],
    ids=[
        "drake",
        "attribute",
        "gazebo",
        "declared",
        "blank",
        "gazebo text",
        "property",
        "transmission",
        "visual",
        "latin",
    ],
)
def test_what_ros_reads_is_read(read, text: str | bytes) -> None:
    arm = read(text)
    assert arm.joint_names == ("j1", "j2")
    np.testing.assert_allclose(arm.forward(np.zeros(2)).position, [0.2, 0, 0.4], atol=1e-15)


@pytest.mark.parametrize(
    "text",
    [
        f'<robot {prefix}="{uri}" name="r"><{prefix[6:]}:include filename="a.xacro"/></robot>'
        for prefix in ("xmlns:xacro", "xmlns:x")
        for uri in (
            "http://www.ros.org/wiki/xacro",
            "http://ros.org/wiki/xacro",
            "http://wiki.ros.org/xacro",
            "https://www.ros.org/wiki/xacro",
            "http://www.ros.org/xacro",
        )
    ]
    + [
        '<robot name="r"><xacro:macro name="m"/></robot>',
        '<root xmlns:xacro="http://playerstage.sourceforge.net/xacro"><xacro:property name="p" value="1"/></root>',
        '<robot name="r"><include filename="$(find my_robot)/arm.xacro"/></robot>',
        '<robot name="r"><property name="width" value="0.2"/><macro name="m" params="p"/></robot>',
        robot(*ARM).replace('xyz="0.1 0 0.2"', 'xyz="${length} 0 0.2"', 1),
        robot(*ARM).replace('"j1"', '"$(arg prefix)j1"'),
    ],
)
def test_a_xacro_file_is_recognised_whatever_its_namespace(read, text: str) -> None:
    with pytest.raises(ConfigError, match=r"arm.urdf is a xacro file, expected a URDF; run `xacro arm.urdf > "):
        read(text)


def numbered(name: str, value: str) -> str:
    inner = LIMIT.replace(f'{name}="', f'{name}="{value}" old="') if name in LIMIT else LIMIT
    return robot(
        link("base", "a"), joint("j1", "base", "a", inner=inner, axis=value if name == "axis" else "0 0 1")
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            robot(link("base", "a"), joint("j0", "world", "base", "fixed"), joint("j1", "base", "a")),
            "'j0'.*'world'",
        ),
        (robot(link("base"), joint("j1", "base", "a")), "joint 'j1' has the child link 'a', which is not defined"),
        (robot(link("base", "a", "a"), joint("j1", "base", "a")), "found 2 links with the name 'a'"),
        (robot(*ARM, joint("j1", "b", "c"), link("c")), "found 2 joints with the name 'j1'"),
        (robot(*ARM, joint("j3", "base", "b")), "link 'b' is the child of the joints 'j2' and 'j3'"),
        (
            robot(*ARM, link("c", "d"), joint("j3", "c", "d"), joint("j4", "d", "c")),
            "'j3', 'j4' form a cycle|'j4', 'j3'",
        ),
        (robot(link("base"), joint("j1", "base", "base")), "'j1' form a cycle"),
        (robot(*ARM, link("c")), r"found the root links 'base', 'c', expected one"),
        (
            robot(*ARM, joint("j3", "b", "c", "screw"), link("c")),
            "'j3' has the type 'screw', expected one of revolute",
        ),
        (robot(*ARM, joint("j3", "b", "c", "Revolute"), link("c")), "has the type 'Revolute'"),
        (
            robot(link("base", "a"), joint("j1", "base", "a", inner="")),
            "Pinocchio cannot read.*does not specify limits",
        ),
        *(
            (numbered(name, value), f'j1.* {name}="{value[:4]}')
            for name in ("lower", "upper", "velocity", "effort")
            for value in ("nan", "inf", "1e999", "1_0", "2 3", "", "two", "0x10")
        ),
        (numbered("lower", "3"), "'j1' has the limits 3 to 2, expected lower below upper"),
        *((numbered("axis", value), "j1.*axis") for value in ("0 0 0", "0 0", "0 0 nan", "0, 0, 1", "")),
        (robot(*ARM).replace("0.1 0 0.2", "0.1 0"), 'j1.* origin xyz="0.1 0", expected 3 finite numbers'),
        (robot(*ARM).replace("0.1 0 0.2", "0.1 0 inf"), "expected 3 finite numbers"),
        ("<robot>" + "<a>" * 200_000 + "</a>" * 200_000 + "</robot>", "is not XML.*nested more than"),
        ("<robot>" + "<a>" * 200_000, "is not XML.*nested more than"),
    ],
)
def test_a_file_that_is_no_robot_is_refused_with_the_reason(read, text: str, message: str, capfd) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(text)
    assert "arm.urdf" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert capfd.readouterr() == ("", ""), "the reason is in the error, not on standard error"


def long(shape: Sequence[tuple[int, int]], count: int, kind: str) -> str:
    links = link(*(f"l{number}" for number in range(count + 1)))
    return robot(links, *(joint(f"j{child}", f"l{parent}", f"l{child}", kind) for parent, child in shape))


@pytest.mark.parametrize("count", [2_500, 10_000])
@pytest.mark.parametrize("shape", ["chain", "star", "cycle"])
@pytest.mark.parametrize("kind", ["revolute", "fixed"])
def test_a_robot_of_thousands_of_links_is_refused_at_once(read, count: int, shape: str, kind: str) -> None:
    pairs = [(0 if shape == "star" else number, number + 1) for number in range(count)]
    if shape == "cycle":
        pairs[-1] = (count - 1, 1)
    text = long(pairs, count, kind)
    begin = time.process_time()
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert time.process_time() - begin < 5.0
    assert len(str(caught.value)) < 1000


def test_a_long_robot_of_few_moving_joints_is_read(read) -> None:
    text = long([(number, number + 1) for number in range(900)], 900, "fixed")
    assert read(text.replace('"j3" type="fixed"', '"j3" type="revolute"')).joint_names == ("j3",)


def test_a_joint_of_the_chain_that_has_no_speed_or_effort_is_read(read) -> None:
    text = robot(*ARM).replace(' velocity="2" effort="1"', "")
    assert np.isinf(read(text).velocity_limits).all()
