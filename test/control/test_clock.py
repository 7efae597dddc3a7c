import threading
import time

from vla_ros.control.clock import Clock, SimulatedClock

SECOND = 1_000_000_000


def wait(clock: Clock, timeout: float, ready: object = None) -> bool:
    changed = threading.Condition()
    with changed:
        return clock.wait_for(changed, lambda: bool(ready), timeout)


def test_events_happen_in_order_at_their_times() -> None:
    seen: list[tuple[str, int]] = []
    times = {"a": 0, "b": SECOND, "c": SECOND, "d": 3 * SECOND}
    events = [(at, lambda name=name: seen.append((name, clock.ros()))) for name, at in times.items()]
    clock = SimulatedClock(events=events)
    assert not wait(clock, 0.0)
    assert seen == [("a", 0)]
    assert not wait(clock, 2.0)
    assert seen[1:] == [("b", SECOND), ("c", SECOND)]
    assert clock.steady() == 2
    assert not clock.exhausted
    clock.sleep(5)
    assert seen[-1] == ("d", 3 * SECOND)
    assert clock.exhausted
    assert clock.now().ros == 7 * SECOND


def test_a_wait_ends_with_its_event() -> None:
    came: list[int] = []
    clock = SimulatedClock(5 * SECOND, [(6 * SECOND, lambda: came.append(1)), (7 * SECOND, lambda: came.append(2))])
    assert wait(clock, 10.0, came)
    assert (clock.steady(), clock.ros(), came) == (1.0, 6 * SECOND, [1])


def test_a_wait_of_less_than_a_nanosecond_ends() -> None:
    clock = SimulatedClock()
    clock.sleep(1e-12)
    assert clock.now().steady == 1


def test_work_takes_its_real_time_times_the_speed() -> None:
    clock, still = SimulatedClock(speed=2.0), SimulatedClock()
    began = time.perf_counter()
    with clock.work(), still.work():
        time.sleep(0.002)
    took = time.perf_counter() - began
    assert 0.004 <= clock.steady() <= 2 * took + 1e-9
    assert still.steady() == 0


def test_the_real_clock_waits_for_another_thread() -> None:
    changed, came, clock = threading.Condition(), threading.Event(), Clock()

    def notify() -> None:
        with changed:
            came.set()
            changed.notify()

    with changed:
        threading.Thread(target=notify).start()
        assert clock.wait_for(changed, came.is_set, 10.0)
    before = clock.now()
    assert not wait(clock, 0.01)
    after = clock.now()
    assert after.steady - before.steady >= 10_000_000
    assert abs(after.ros - time.time_ns()) < SECOND
    assert abs(clock.steady() - after.steady / 1e9) < 1
