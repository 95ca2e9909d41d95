"""How many threads the next replay should use, from how long the last ones took.

With another process on a core, two threads that meet at barriers are as slow as the slower one, and no faster than one
thread that never waits. Results do not depend on the number of threads, so it may change with every step. Pure: the
clock is an argument. Owned by one backend's compute thread.
"""

from dataclasses import dataclass, field

_TRIAL_STEPS = 6  # replays of a shape that a decision rests on
_SUSPICIOUS_STEPS = 4  # of the last 8, with long waits, before fewer threads are tried
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 16.0
_GAIN = 0.95  # a trial must take less than this part of the time to be kept
_MAX_SHAPES = 64


@dataclass(slots=True)
class _Trial:
    threads: int
    key: object
    baseline_s: float
    times_s: list[float] = field(default_factory=list)
    num_other_steps: int = 0


class ThreadGovernor:
    """Starts with all threads; tries fewer when barriers wait long, and more again from time to time."""

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._threads = max_threads
        self._recent_waits = 0  # one bit per replay
        self._mean_s: dict[object, float] = {}  # by shape, at the present number of threads
        self._trial: _Trial | None = None
        self._num_failed_trials = 0
        self._next_trial_s = 0.0
        self._pause_s = _FIRST_PAUSE_S

    def threads(self, key: object, now_s: float) -> int:
        """Threads for a replay of the shape `key`."""
        if self._trial is None and self._threads < self._max_threads and now_s >= self._next_trial_s:
            self._begin(min(self._max_threads, self._threads + self._stride()), key)
        if self._trial is not None and self._trial.key == key:
            return self._trial.threads
        return self._threads

    def record(self, key: object, seconds: float, waited_long: bool, now_s: float) -> None:
        """What the replay took, and whether a thread waited long for another."""
        trial = self._trial
        if trial is not None:
            self._record_trial(trial, key, seconds, now_s)
            return
        mean = self._mean_s.get(key)
        if mean is None and len(self._mean_s) >= _MAX_SHAPES:
            self._mean_s.clear()
        self._mean_s[key] = seconds if mean is None else mean + (seconds - mean) / _TRIAL_STEPS
        self._recent_waits = (self._recent_waits << 1 | waited_long) & 0xFF
        suspicious = self._recent_waits.bit_count() >= _SUSPICIOUS_STEPS
        if suspicious and self._threads > 1 and now_s >= self._next_trial_s:
            self._begin(max(1, self._threads - self._stride() // 2), key)

    def _stride(self) -> int:
        """How far the next trial goes up; half as far down. Far first, then nearer: the best count may be anywhere."""
        return (self._threads, self._threads // 2, 2)[self._num_failed_trials % 3] or 1

    def _begin(self, threads: int, key: object) -> None:
        baseline = self._mean_s.get(key)
        if baseline is not None:
            self._trial = _Trial(threads, key, baseline)

    def _record_trial(self, trial: _Trial, key: object, seconds: float, now_s: float) -> None:
        if key != trial.key:
            trial.num_other_steps += 1
            if trial.num_other_steps > 8 * _TRIAL_STEPS:
                self._end(now_s, kept=False)
            return
        trial.times_s.append(seconds)
        if len(trial.times_s) < _TRIAL_STEPS:
            return
        kept = sum(trial.times_s) / _TRIAL_STEPS < _GAIN * trial.baseline_s
        if kept:
            self._threads = trial.threads
            self._mean_s.clear()
        self._end(now_s, kept=kept)

    def _end(self, now_s: float, *, kept: bool) -> None:
        self._trial = None
        self._recent_waits = 0
        self._num_failed_trials = 0 if kept else self._num_failed_trials + 1
        self._pause_s = _FIRST_PAUSE_S if kept else min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self._next_trial_s = now_s + self._pause_s
