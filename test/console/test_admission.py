"""Which page is let in, and which of its requests counts."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_ros.console.admission import HOLD, VALID, Desk, Gate, PageRequest, RequestRefusedError, read_request
from vla_ros.console.advice import REMEDIES, describe_reason
from vla_ros.control.reasons import Level, Reason

GATE = Gate("s3cret", ("localhost", "127.0.0.1", "::1"))


class Screen:
    """A page that behaves, and the desk of its connection."""

    def __init__(self) -> None:
        self.now, self.id, self.number = 100.0, 0, 7
        self.desk = Desk(lambda: self.now)
        self.look()

    def look(self) -> None:
        self.beat, self.seen = self.desk.show(self.number), self.number

    def request(self, do: str, text: str = "") -> PageRequest:
        self.id += 1
        return PageRequest(do, self.id, self.beat, self.seen, text)

    def ask(self, do: str, text: str = "") -> float:
        return self.desk.admit(self.request(do, text), self.number)

    def hold(self, what: str = "arm", seconds: float = HOLD + 0.1) -> None:
        self.look()
        self.ask("press", what)
        self.now += seconds
        self.look()


def refused(screen: Screen, do: str = "arm") -> str:
    with pytest.raises(RequestRefusedError) as error:
        screen.ask(do)
    return str(error.value)


def test_a_press_that_is_held_arms_once_and_for_a_second() -> None:
    screen = Screen()
    screen.hold()
    assert screen.ask("arm") == screen.now + VALID
    assert "hold it" in refused(screen), "the press is used up"


@pytest.mark.parametrize("do", ["arm", "continue"])
def test_what_moves_the_arm_needs_a_press_for_it_that_was_long_enough_and_not_released(do: str) -> None:
    screen = Screen()
    assert "hold it" in refused(screen, do)
    screen.hold(do, HOLD - 0.1)
    assert "hold it" in refused(screen, do)
    screen.hold("continue" if do == "arm" else "arm")
    assert "hold it" in refused(screen, do), "the press was for something else"
    screen.hold(do)
    screen.ask("release")
    assert "hold it" in refused(screen, do)
    screen.hold(do, 6.0)
    assert "hold it" in refused(screen, do), "nobody holds a button for so long on purpose"


@pytest.mark.parametrize("do", ["arm", "continue", "reset", "correct", "press"])
def test_a_request_about_another_state_is_void(do: str) -> None:
    screen = Screen()
    screen.hold(do)
    screen.number += 1
    assert "state has changed" in refused(screen, do)
    screen = Screen()
    screen.hold(do)
    screen.number += 1
    screen.look()
    screen.seen -= 1
    assert "state has changed" in refused(screen, do), "the number must be the one of the beat"


@pytest.mark.parametrize("do", ["arm", "continue", "reset", "correct", "pause", "instruct", "label", "record"])
def test_a_request_is_void_after_a_second_when_repeated_and_after_a_reconnect(do: str) -> None:
    screen = Screen()
    screen.hold(do)
    screen.now += VALID + 0.01
    assert "over a second old" in refused(screen, do)
    screen.hold(do)
    first = screen.request(do)
    screen.desk.admit(first, screen.number)
    with pytest.raises(RequestRefusedError, match="made before"):
        screen.desk.admit(first, screen.number)
    screen.hold(do)
    late, other = screen.request(do), Desk(lambda: screen.now)
    other.show(screen.number)
    with pytest.raises(RequestRefusedError, match="over a second old"):
        other.admit(late, screen.number)


def test_only_stop_and_disarm_may_be_repeated_old_and_about_another_state() -> None:
    screen = Screen()
    for do in ("stop", "disarm"):
        request = screen.request(do)
        screen.now += 60.0
        screen.number += 1
        assert [screen.desk.admit(request, screen.number) for _ in range(3)] == [float("inf")] * 3
    fresh = Desk(lambda: screen.now)
    assert fresh.admit(PageRequest("stop"), 99) == float("inf"), "no beat, no id"


@given(st.lists(st.sampled_from(["look", "wait", "press", "release", "arm", "change"]), max_size=40))
def test_whatever_a_page_sends_only_the_act_arms(steps: list[str]) -> None:
    """A model: armed only by a press, at least HOLD without a release or change, then the request."""
    screen, pressed = Screen(), None
    for step in steps:
        if step == "look":
            screen.look()
        elif step == "wait":
            screen.now += 0.3
        elif step == "change":
            screen.number, pressed = screen.number + 1, None
        else:
            try:
                screen.ask(step, "arm")
            except RequestRefusedError:
                continue
            if step == "arm":
                assert pressed is not None
                assert screen.now - pressed >= HOLD
            pressed = screen.now if step == "press" else None


@pytest.mark.parametrize(
    ("hosts", "lets"),
    [
        (["localhost:8090"], True), (["127.0.0.1"], True), (["[::1]:1"], True), (["LOCALHOST:9"], True),
        (["evil.example"], False), (["localhost.evil.example:8090"], False), (["localhost", "evil.example"], False),
        ([], False), ([""], False), (["[::1"], False),
    ],
)  # fmt: skip
def test_only_own_names_are_hosts(hosts: list[str], lets: bool) -> None:
    assert GATE.is_host(hosts) is lets


@pytest.mark.parametrize(
    "origins",
    [[], ["null"], ["http://evil.example"], ["https://localhost:8090"], ["http://localhost:8091"],
     ["http://localhost:8090", "http://localhost:8090"], ["http://localhost:8090/"]],
)  # fmt: skip
def test_only_a_page_of_this_server_is_an_origin(origins: list[str]) -> None:
    assert GATE.is_origin(["http://localhost:8090"], ["localhost:8090"])
    assert not GATE.is_origin(origins, ["localhost:8090"])


@pytest.mark.parametrize("tokens", [[], [""], ["s3cre"], ["s3crets"], ["s3cret", "s3cret"], ["\udcff"], ["é"]])
def test_only_the_token_opens(tokens: list[str]) -> None:
    assert GATE.knows(["s3cret"])
    assert not GATE.knows(tokens)


@given(st.one_of(st.text(), st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps)))
def test_what_is_no_request_is_none(text: str) -> None:
    assert read_request(text) is None


@pytest.mark.parametrize(
    "change", [{"id": "1"}, {"id": True}, {"number": 1.5}, {"text": 3}, {"do": "open"}, {"by": "x" * 2000}]
)
def test_a_field_of_another_type_makes_it_none(change: dict[str, object]) -> None:
    sound = {"do": "arm", "id": 1, "beat": "b", "number": 2, "text": "", "by": "mouse"}
    assert read_request(json.dumps(sound)) == PageRequest("arm", 1, "b", 2, "", "mouse")
    assert read_request(json.dumps(sound | change)) is None
    assert read_request("[" * 3000) is None


def test_every_reason_that_keeps_the_arm_has_advice() -> None:
    assert set(REMEDIES) == {reason for reason in Reason if reason.level is not Level.COUNT}
    assert describe_reason("camera_stale", "none for 1 s")["advice"]
    assert describe_reason("of_a_newer_node", "why")["detail"] == "why"
