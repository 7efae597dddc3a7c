import base64
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from vla_ros.errors import VlaRosError

STRING = "std_msgs/msg/String"


# --- the loop ------------------------------------------------------------------------------------------------


def test_timer_recurs_and_can_be_cancelled(graph, spin_until):
    node = graph.create_node("ticker")
    ticks = []
    timer = node.create_timer(0.05, lambda: ticks.append(time.monotonic()))
    started = time.monotonic()
    spin_until(graph, lambda: len(ticks) >= 5)
    assert ticks[4] - started >= 0.2
    timer.cancel()
    count = len(ticks)
    end = time.monotonic() + 0.3
    graph.spin(lambda: time.monotonic() > end)
    assert len(ticks) == count


def test_callbacks_run_on_the_thread_that_spins(graph, spin_until):
    node = graph.create_node("ticker")
    threads = []
    node.create_timer(0.01, lambda: threads.append(threading.get_ident()))
    spin_until(graph, lambda: threads)
    assert set(threads) == {threading.get_ident()}


def test_spin_asks_until_at_least_every_period(graph):
    graph.create_node("idle")
    asked = []

    def until():
        asked.append(time.monotonic())
        return len(asked) > 5

    started = time.monotonic()
    graph.spin(until, period=0.05)
    assert time.monotonic() - started < 3.0


def test_spinning_twice_at_once_is_refused(graph, spin_until):
    node = graph.create_node("ticker")
    errors = []

    def again():
        try:
            graph.spin(lambda: True)
        except VlaRosError as error:
            errors.append(error)

    node.create_timer(0.01, again)
    spin_until(graph, lambda: errors)
    assert "already spinning" in str(errors[0])


def test_clock_returns_system_time(graph):
    node = graph.create_node("clocked")
    assert abs(node.get_clock().now().nanoseconds - time.time_ns()) < 2_000_000_000


def test_logger_writes_level_and_name(graph, capfd):
    node = graph.create_node("talker")
    node.get_logger().warning("careful")
    node.get_logger().debug("not shown at level info")
    said = capfd.readouterr()
    assert "[WARN]" in said.err
    assert "talker" in said.err
    assert "careful" in said.err
    assert "not shown" not in said.err + said.out


# --- the end -------------------------------------------------------------------------------------------------


def test_close_twice_and_from_a_callback_and_from_another_thread(open_here):
    first = open_here()
    first.create_node("one").create_timer(0.01, first.close)
    first.spin(lambda: False)
    first.close()

    second = open_here()
    second.create_node("two")
    thread = threading.Thread(target=second.close)
    timer = threading.Timer(0.2, thread.start)
    timer.start()
    second.spin(lambda: False)
    timer.join()
    thread.join(10)
    assert not thread.is_alive()
    second.close()
    with pytest.raises(VlaRosError, match="closed"):
        second.create_node("three")


def test_two_graphs_in_one_process_hear_each_other(open_here, spin_until):
    one, two = open_here(), open_here()
    publisher = one.create_node("one").create_publisher(one.message(STRING), "/text", one.qos("instruction"))
    publisher.publish(one.message(STRING)(data="hello"))
    got = []
    two.create_node("two").create_subscription(two.message(STRING), "/text", got.append, two.qos("instruction"))
    spin_until(two, lambda: got)
    one.close()
    assert got[0].data == "hello"


def run_script(backend: str, script: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), backend],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_spin_and_the_node_can_still_send(backend, peer, wait_until, number):
    peer.ask("subscribe", topic="/text", type_name=STRING, qos="default")
    child = run_script(
        backend,
        """
        import sys
        from vla_ros.graph import open_graph
        with open_graph(sys.argv[1]) as graph:
            node = graph.create_node("vla_policy")
            publisher = node.create_publisher(graph.message("std_msgs/msg/String"), "/text", graph.qos("default"))
            node.create_timer(0.05, lambda: print(publisher.get_subscription_count(), flush=True))
            try:
                graph.spin(lambda: False)
            except KeyboardInterrupt:
                publisher.publish(graph.message("std_msgs/msg/String")(data="holding"))
                print("interrupted", flush=True)
        print("closed", flush=True)
        """,
    )
    for line in child.stdout:
        if line.strip() == "1":
            break
    child.send_signal(number)
    out, err = child.communicate(timeout=20)
    assert child.returncode == 0, err
    assert out.split()[-2:] == ["interrupted", "closed"]
    wait_until(lambda: peer.ask("received", topic="/text"))
    assert b"holding" in base64.b64decode(peer.ask("received", topic="/text")[-1])


def test_a_signal_in_a_destructor_is_not_lost_and_a_second_one_ends_a_stuck_callback(backend):
    """Python prints and drops an exception that a destructor raises: KeyboardInterrupt too."""
    child = run_script(
        backend,
        """
        import os, signal, sys, time
        from vla_ros.graph import open_graph
        class Dropped:
            def __del__(self):
                os.kill(os.getpid(), signal.SIGINT)
                sum(range(1000))  # the handler runs between two instructions, here
        def stuck():
            print("stuck", flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        with open_graph(sys.argv[1]) as graph:
            node = graph.create_node("vla_policy")
            timer = node.create_timer(0.01, lambda: (Dropped(), None)[1])
            try:
                graph.spin(lambda: False)
            except KeyboardInterrupt:
                print("first", flush=True)
            node.destroy_timer(timer)
            node.create_timer(0.01, stuck)
            try:
                graph.spin(lambda: False)
            except KeyboardInterrupt:
                print("second", flush=True)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        """,
    )
    out, err = child.communicate(timeout=30)
    assert child.returncode == 0, err
    assert out.split() == ["first", "stuck", "second"]
    assert "Exception ignored" not in err


def test_signal_handlers_of_the_program_stay(open_here):
    came = []
    before = signal.signal(signal.SIGTERM, lambda *_: came.append(True))
    try:
        graph = open_here()
        graph.create_node("vla_policy").create_timer(0.01, lambda: os.kill(os.getpid(), signal.SIGTERM))
        graph.spin(lambda: bool(came))
    finally:
        signal.signal(signal.SIGTERM, before)


def test_no_thread_is_left_after_close(backend):
    child = run_script(
        backend,
        """
        import os, sys, threading, numpy
        from vla_ros.graph import open_graph
        def once():
            with open_graph(sys.argv[1]) as graph:
                node = graph.create_node("short")
                node.create_publisher(graph.message("std_msgs/msg/String"), "/a", graph.qos("default"))
                node.create_subscription(graph.message("std_msgs/msg/String"), "/a", print, graph.qos("default"))
                graph.spin(lambda: True)
            return len(os.listdir("/proc/self/task"))
        kept = once()  # what libraries start once and keep
        left = [once() for _ in range(3)]
        assert left == [kept] * 3, (kept, left)
        assert threading.active_count() == 1
        """,
    )
    _, err = child.communicate(timeout=60)
    assert child.returncode == 0, err


def test_a_steady_timer_runs_while_simulated_time_stands_still(open_here, spin_until):
    """A simulator that died takes /clock with it; the watchdog has to notice."""
    graph = open_here("--ros-args", "-p", "use_sim_time:=true")
    node = graph.create_node("vla_policy")
    calls = []
    timer = graph.create_steady_timer(node, 0.02, lambda: calls.append(node.get_clock().now().nanoseconds))
    spin_until(graph, lambda: len(calls) >= 5)
    assert set(calls) == {0}
    assert node.destroy_timer(timer)
