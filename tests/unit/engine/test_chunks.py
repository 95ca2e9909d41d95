"""How a prompt is cut into chunks for the stages of a pipeline."""

import pytest

from support.sim_engine import SimEngine, config, request


@pytest.mark.parametrize(("num_stages", "chunks"), [(1, [512]), (2, [64] * 8), (4, [32] * 16)])
def test_prompt_is_cut_for_the_pipeline(num_stages: int, chunks: list[int]) -> None:
    """Over N stages a prompt becomes about 4 N chunks, none below min_chunk_tokens; alone it stays whole."""
    limits = {"max_rows": 512, "prefill_chunk_tokens": 512, "max_context": 1024, "num_blocks": (64,)}
    sim = SimEngine(config(num_stages=num_stages, **limits))
    sim.add(request(tuple(i % 199 for i in range(512)), 1))
    sim.drain()
    assert [piece.num_tokens for issue in sim.issues for piece in issue.plan.slices] == chunks
    sim.check_outputs()
