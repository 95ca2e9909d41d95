"""Cards of two generations and a CPU in one pipeline: each decides for itself, and what it decides is told."""

from dataclasses import replace

import pytest

from lamina.coordinator.cli.options import stage_settings
from lamina.kernels.cuda import backend as cuda_backend
from lamina.spec.errors import InvalidConfig
from support.cuda_emulated import EmulatedDevice
from support.loopback import SETTINGS, Cluster, Talk, TinyModel, run_scene, running_worker

PROMPT = [1, 40, 7, 99, 250, 3, 17]


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda:0 is a Pascal card, cuda:1 an Ada card."""
    monkeypatch.setattr(cuda_backend, "open_device", lambda index: EmulatedDevice([(6, 1), (8, 9)][index]))


@pytest.mark.usefixtures("cards")
@pytest.mark.parametrize("cluster_wish", ["auto", "off"])
def test_both_kinds_coexist_in_one_pipeline(model: TinyModel, cluster_wish: str) -> None:
    """C-13, C-14, C-15, A-07: the Pascal card tries its recordings, the Ada card replays, the CPU's tape is always
    replayed; a coordinator that says off is obeyed by the cards. Counts and dtypes come with Describe."""
    settings = replace(SETTINGS, cuda_graphs=cluster_wish)

    async def scene() -> None:
        async with (
            running_worker("a", ("cuda:0", "reference", "cuda:1")) as a,
            Cluster.over(model, a, settings=settings) as cluster,
        ):
            pipeline = await cluster.deploy((1, 2), ("a/0", "a/1", "a/2"))
            tokens = await Talk(pipeline, PROMPT).run(6)
            assert len(tokens) == 6
            pascal, host, ada = sorted(await cluster.stages("a"), key=lambda stage: stage.stage)
            assert [stage.compute_dtype for stage in (pascal, host, ada)] == ["f32", "f32", "bf16"]
            assert (host.graphs.captures, host.graphs.replays) == (1, 6)
            for stage in (pascal, ada):
                num_run = stage.graphs.replays + sum(stage.graphs.vetoes.values())
                assert num_run == (6 if cluster_wish == "auto" else 0)
                assert stage.graphs.captures == (2 if cluster_wish == "auto" else 0)  # the prompt and single tokens
            if cluster_wish == "auto":
                assert ada.graphs.replays == 6
                assert set(pascal.graphs.vetoes) <= {"not faster"}

    run_scene(scene)


def test_the_clusters_wish_is_an_option() -> None:
    """C-14: of the coordinator, in any case of letters; another word is refused."""
    assert stage_settings(4096, "", 1, "f16", "f32", 512).cuda_graphs == "auto"
    assert stage_settings(4096, "", 1, "f16", "f32", 512, "OFF").cuda_graphs == "off"
    with pytest.raises(InvalidConfig, match="'never' is none of auto, on, off"):
        stage_settings(4096, "", 1, "f16", "f32", 512, "never")
