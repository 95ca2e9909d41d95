"""How many threads a replay gets, in simulated time: contention is noticed, measured, and forgotten."""

from collections.abc import Callable

from lamina.kernels.cpu.governor import ThreadGovernor

Cost = Callable[[int], tuple[float, bool]]


def _simulate(governor: ThreadGovernor, cost: Cost, seconds: float, start_s: float = 0.0) -> tuple[list[int], float]:
    """Threads of every replay over simulated seconds, and the time then; cost(threads) is (seconds, long wait)."""
    now, used = start_s, []
    while now < start_s + seconds:
        threads = governor.threads("decode", now)
        took, waited = cost(threads)
        now += took
        governor.record("decode", took, waited, now)
        used.append(threads)
    return used, now


def _quiet(threads: int) -> tuple[float, bool]:
    return 0.008 / threads, False


def _one_core_taken(threads: int) -> tuple[float, bool]:
    """Two threads are as slow as the one that shares its core."""
    return (0.008, False) if threads == 1 else (0.0085, True)


def test_a_quiet_machine_gets_all_threads() -> None:
    """No trial ever costs a step."""
    used, _ = _simulate(ThreadGovernor(8), _quiet, 3.0)
    assert set(used) == {8}


def test_two_threads_on_one_free_core_become_one() -> None:
    """Performance notes, section 1: two threads that are no faster than one give a core back, and soon."""
    governor = ThreadGovernor(2)
    used, now = _simulate(governor, lambda n: (0.008, False) if n == 1 else (0.010, True), 1.0)
    assert used[:4] == [2, 2, 2, 2]
    assert used[20:40].count(1) > 15
    later, now = _simulate(governor, lambda n: (0.008, False) if n == 1 else (0.010, True), 30.0, now)
    assert later.count(2) < 0.05 * len(later)
    back, _ = _simulate(governor, _quiet, 40.0, now)
    assert set(back[-100:]) == {2}


def test_waiting_alone_is_no_reason() -> None:
    """Long waits with more threads still faster (an uneven split of the work): they stay."""
    used, _ = _simulate(ThreadGovernor(4), lambda n: (0.02 / n, n > 1), 5.0)
    assert used.count(4) > 0.9 * len(used)


def test_little_gain_keeps_the_threads() -> None:
    """A trial must win clearly; 8.0 ms against 8.3 is noise."""
    used, _ = _simulate(ThreadGovernor(2), lambda n: (0.008, False) if n == 1 else (0.0083, True), 5.0)
    assert used.count(2) > 0.9 * len(used)


def test_many_threads_step_down_to_the_free_cores() -> None:
    """With 8 threads on 4 free cores it settles near 4, step by step, and never below what is best."""

    def crowded(threads: int) -> tuple[float, bool]:
        return (0.08 / threads, False) if threads <= 4 else (0.04, True)

    used, _ = _simulate(ThreadGovernor(8), crowded, 60.0)
    assert sorted(used[-200:])[100] in (4, 5)


def test_steps_of_other_shapes_do_not_decide() -> None:
    """A trial is judged by the shape it began with; if that never comes back, it ends."""
    governor = ThreadGovernor(2)
    now = 0.0
    for _ in range(8):
        governor.record("decode", 0.01, True, now)
    assert governor.threads("decode", now) == 1
    for _ in range(60):
        assert governor.threads("prefill", now) == 2
        governor.record("prefill", 0.001, False, now)
    assert governor.threads("decode", now) == 2
