"""The page in a real browser, beside the real console and the real node."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tools.chromium import Browser, Tab, wait
from vla_ros.control.mode import Mode
from vla_ros.control.safety import State
from vla_ros.graph import open_graph

SHOWN = "document.body?.dataset.state"
SOON = 2.0  # s; a page shows what the node has said, or is dead
LONG = 1.1  # s of a press that arms


def shows(page: Tab, state: str) -> None:
    page.until(f"{SHOWN} === {state!r}")


def is_shown(robot: Any, page: Tab, state: str, **said: str) -> None:
    """Wait until the node says ``state``, and until the page shows what it says."""
    wanted = {"state": state, **said}
    robot.until(lambda: robot.status.items() >= wanted.items(), patience=60.0)
    shown = f"{SHOWN} === {state!r} && document.querySelector('#state').textContent === {state!r}"
    page.until(f"{shown} && {json.dumps(said)}.mode in {{undefined: 1, [page.view.mode]: 1}}")


def done(page: Tab, act: Callable[[], Any], ready: Callable[[], Any]) -> None:
    """Act until it is done: on a busy machine, a reason comes or goes meanwhile, which voids what was asked."""
    for _ in range(20):
        act()
        with contextlib.suppress(AssertionError):
            wait(ready, 2.0)
            return
    raise AssertionError(f"twenty times in vain: {acts(page)}")


def is_armed(node: Any) -> bool:
    return node.safety.state in (State.ARMED, State.HOLDING)


def acts(page: Tab) -> str:
    return json.dumps(page.eval("page.view.acts"))


def write(page: Tab, text: str) -> None:
    """Type an instruction, and give it."""
    page.eval("document.querySelector('#instruction').value = ''; document.querySelector('#instruction').focus()")
    for key in text:
        page.key(key)
    page.key("Enter")


@pytest.fixture
def operated(robot, arm, inside, console, browser: Browser) -> Any:
    """A disarmed node, its console, and a page of it."""
    node, served = inside("control.armed:=false"), console()
    page = browser.open(served.url)
    shows(page, "disarmed")
    yield node, served, page
    assert page.errors == []


def test_every_state_is_shown_with_its_reasons_and_what_to_do(operated, robot, arm) -> None:
    node, _, page = operated
    is_shown(robot, page, "disarmed")
    done(page, lambda: page.hold("#arm", LONG), lambda: is_armed(node))
    is_shown(robot, page, "armed", mode="autonomous")
    arm.sees = False
    is_shown(robot, page, "holding")
    page.until("document.querySelector('#why').innerText.includes('camera_stale')")
    assert "Look at the camera's driver" in page.eval("document.querySelector('#why').innerText")
    arm.sees = True
    is_shown(robot, page, "armed")
    done(page, lambda: page.click('[data-do="pause"]'), lambda: node.safety.mode is Mode.PAUSED)
    is_shown(robot, page, "armed", mode="paused")
    done(page, lambda: page.hold("#continue", LONG), lambda: node.safety.mode is Mode.AUTONOMOUS)
    is_shown(robot, page, "armed", mode="autonomous")
    arm.reports = False
    is_shown(robot, page, "holding")
    page.until("document.querySelector('#why').innerText.includes('joint_state_stale')")
    arm.reports = True
    is_shown(robot, page, "armed")
    done(page, lambda: write(page, "raise"), lambda: node.inputs.snapshot.instruction == "raise")
    is_shown(robot, page, "holding")
    page.until("document.querySelector('#why').innerText.includes('inference_error')")
    page.click("#stop")
    is_shown(robot, page, "stopped", stopped_by="operator_stop")
    assert "reset and arm" in page.eval("document.querySelector('#why').innerText")
    assert page.eval("document.querySelector('#arm').disabled")
    done(page, lambda: page.click('[data-do="reset"]'), lambda: node.safety.state is State.DISARMED)
    is_shown(robot, page, "disarmed")
    robot.node.destroy_subscription(robot.driver)
    page.until("document.querySelector('#why').innerText.includes('driver')")
    assert node.safety.armings == 1


CONTROLS = ("body", "#stop", "#arm", "#continue", "[data-do=disarm]", "[data-do=pause]", "#instruct button")


def test_a_key_stops_wherever_the_focus_is_and_no_key_arms(operated) -> None:
    node, _, page = operated
    pairs = [(control, key) for control in CONTROLS for key in (" ", "Escape")] + [("#instruction", "Escape")]
    for focus, key in pairs:
        node.reset()
        node.enable(True)
        shows(page, "armed")
        page.eval(f"document.querySelector({focus!r}).focus()")
        page.key(key)
        wait(lambda: node.safety.state is State.STOPPED)
        shows(page, "stopped")
        page.until("page.stops === 0")
    node.reset()
    shows(page, "disarmed")
    armings = node.safety.armings
    for focus in (*CONTROLS, "#instruction"):
        page.eval(f"document.querySelector({focus!r}).focus()")
        assert page.eval("document.activeElement.id") not in ("arm", "continue"), "what arms takes no focus"
        common = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        page.call("Input.dispatchKeyEvent", type="keyDown", **common)
        page.eval(f"new Promise((done) => setTimeout(done, {1000 * LONG}))")
        page.call("Input.dispatchKeyEvent", type="keyUp", **common)
    assert node.safety.armings == armings


def test_space_writes_in_a_text_field_and_tab_reaches_no_button_that_arms(operated) -> None:
    node, _, page = operated
    page.eval("document.querySelector('#instruction').focus()")
    for key in ("a", " ", "b"):
        page.key(key)
    assert page.eval("document.querySelector('#instruction').value") == "a b"
    reached = set()
    for _ in range(25):
        page.key("Tab")
        reached.add(page.eval("document.activeElement.id || document.activeElement.dataset.do || ''"))
    assert "disarm" in reached
    assert not reached & {"arm", "continue"}
    assert node.safety.state is State.DISARMED


def test_only_a_pointer_that_presses_and_holds_arms(operated, robot) -> None:
    node, _, page = operated
    page.click("#arm")
    page.hold("#arm", 0.4)
    at = page.place("#arm")
    page.mouse("mousePressed", at)
    page.mouse("mouseMoved", (at[0], at[1] + 300))
    page.until("page.held === null")
    page.mouse("mouseReleased", at)
    page.mouse("mousePressed", at)
    page.key("Tab")
    page.until("page.held === null")
    page.mouse("mouseReleased", at)
    page.eval(
        "for (const type of ['pointerdown', 'mousedown', 'click']) document.querySelector('#arm')"
        ".dispatchEvent(new PointerEvent(type, {bubbles: true, isPrimary: true, button: 0, pointerId: 1}))"
    )
    assert page.eval("page.held === null"), "an event that a script made is no press"
    assert node.safety.armings == 0
    done(page, lambda: page.hold("#arm", LONG), lambda: is_armed(node))
    shows(page, "armed")
    assert page.eval("document.activeElement === document.body")
    assert node.safety.armings == 1


def test_two_pages_a_change_by_one_voids_the_press_on_the_other(operated, browser: Browser) -> None:
    node, served, page = operated
    other = browser.open(served.url)
    shows(other, "disarmed")
    at = page.place("#arm")
    page.mouse("mousePressed", at)
    other.click("#stop")
    shows(page, "stopped")
    done(other, lambda: other.click('[data-do="reset"]'), lambda: node.safety.state is State.DISARMED)
    shows(page, "disarmed")
    time.sleep(LONG)  # the press goes on
    page.mouse("mouseReleased", at)
    assert node.safety.armings == 0
    done(other, lambda: other.hold("#arm", LONG), lambda: is_armed(node))
    shows(page, "armed")
    assert node.safety.armings == 1
    page.key("Escape")
    shows(other, "stopped")
    for act in ("page 2 by mouse", "page 1 by Escape"):
        page.until(f"JSON.stringify(page.view.acts).includes({act!r})")  # every page is told in its own time


def test_a_phone_arms_by_touch_shows_stop_always_and_fits_its_width(operated, browser: Browser) -> None:
    node, served, _ = operated
    phone = browser.open(served.url, 390, 844, mobile=True)
    shows(phone, "disarmed")
    assert phone.eval("document.documentElement.scrollWidth") == 390
    phone.touch("#arm", 0.3)
    assert node.safety.armings == 0
    done(phone, lambda: phone.touch("#arm", LONG), lambda: is_armed(node))
    shows(phone, "armed")
    for where in ("0", "document.body.scrollHeight"):
        phone.eval(f"window.scrollTo(0, {where})")
        seen = "(() => { const b = document.querySelector('#stop').getBoundingClientRect(); return document"
        assert (
            phone.eval(
                f"{seen}.elementFromPoint(b.x + b.width / 2, b.y + b.height / 2).closest('button')?.id }})()"
            )
            == "stop"
        )
    phone.touch("#stop", 0.05)
    shows(phone, "stopped")
    assert phone.errors == []


def test_a_page_without_its_console_is_dead_says_so_and_comes_back_by_itself(operated) -> None:
    node, served, page = operated
    node.enable(True)
    shows(page, "armed")
    os.kill(served.process.pid, signal.SIGSTOP)
    try:
        shows(page, "lost")
        assert "use the emergency stop" in page.eval("document.querySelector('#dead').innerText")
        assert page.eval("getComputedStyle(document.querySelector('main')).visibility") == "hidden"
        page.key("Escape")
        page.until("document.querySelector('#stopped').textContent.includes('NOT CONFIRMED')")
        page.until("document.querySelector('#connected').textContent.includes('trying again')")
    finally:
        os.kill(served.process.pid, signal.SIGCONT)
    shows(page, "stopped")
    assert "connected" in page.eval("document.querySelector('#connected').textContent")
    assert node.safety.state is State.STOPPED, "the stop was repeated"


def test_a_page_without_its_node_is_dead(robot, arm, start, console, browser: Browser) -> None:
    node, served = start("-p", "policy.instruction:=go on"), console()
    page = browser.open(served.url)
    shows(page, "disarmed")
    node.signal(signal.SIGSTOP)
    try:
        shows(page, "lost")
        assert "Node lost" in page.eval("document.querySelector('#dead').textContent")
        page.hold("#arm", LONG)
    finally:
        node.signal(signal.SIGCONT)
    shows(page, "disarmed")
    robot.until(lambda: robot.status["state"] == "disarmed")
    assert node.end() == 0
    shows(page, "lost")
    page.errors.clear()


def test_a_name_that_two_nodes_have_is_shown_and_not_armed(operated) -> None:
    node, _, page = operated
    with open_graph("dds") as graph:
        graph.create_node("vla_policy")
        page.until("document.querySelector('#why').innerText.includes('2 nodes are called /vla_policy')")
        assert page.eval("document.querySelector('#arm').disabled")
        page.hold("#arm", LONG)
        assert node.safety.armings == 0


def test_random_clicks_keys_and_disconnects_never_arm_and_never_show_another_state(operated, robot) -> None:
    node, _, page = operated
    chance, disagreed, ours = random.Random(51), [], 0
    width, height = 1440, 900
    for number in range(300):
        what = chance.random()
        if what < 0.6:
            at = chance.uniform(0, width), chance.uniform(70, height)
            if what < 0.15:
                at = page.place(chance.choice(["#arm", "#continue"]))
            page.mouse("mousePressed", at)
            page.mouse("mouseReleased", at)
        elif what < 0.85:
            page.key(chance.choice(["Enter", "Tab", " ", "Escape", "a"]))
        elif what < 0.93:
            page.eval("page.socket?.close()")
        else:
            node.reset()
            ours += node.enable(True)[0] and node.safety.armings - ours > 0
        if number % 20 == 0:
            robot.until(lambda: time.monotonic() - robot.statuses[-1][0] > 0.3)
            state = robot.status["state"]
            page.until(f"[{state!r}, 'lost'].includes({SHOWN})", SOON)
            disagreed += [state] if page.eval(SHOWN) not in (state, "lost") else []
    assert disagreed == []
    assert node.safety.armings == ours
    page.errors.clear()  # connections that were closed
