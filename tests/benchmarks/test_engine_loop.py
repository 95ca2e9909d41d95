"""The step loop alone runs: it stands on the engine's inner interfaces."""

from engine_loop import EngineLoop


def test_steps_are_counted_and_timed() -> None:
    answer = EngineLoop().measure(num_seqs=2, num_stages=2, num_tokens=16, profile=True)
    assert answer["num_steps"] == 2 * (16 - 8)
    assert isinstance(answer["us_per_step"], float)
    assert 0 < answer["us_per_step"] < 1e6
    assert "schedule" in str(answer["profile"])


def test_submission_is_timed() -> None:
    assert 0 < EngineLoop().submit(prompt_tokens=64, num_requests=3) < 1e6
