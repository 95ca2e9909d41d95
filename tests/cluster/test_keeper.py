"""The keeper over live workers: what becomes of the look at them when a session ends."""

import asyncio
import io
import logging

import pytest
from rich.console import Console

from lamina.coordinator.api.served_model import ServedModel
from lamina.coordinator.api.service import InferenceService
from lamina.coordinator.api.state import Ready
from lamina.coordinator.cli.keeper import Keeper
from lamina.coordinator.cluster.client import WorkerClient
from lamina.coordinator.model_file import open_model_file
from lamina.coordinator.session import SessionSettings, SplitChoice
from lamina.coordinator.telemetry.metrics import Metrics
from support.cluster import ROOT
from support.loopback import SETTINGS, eventually, run_scene, running_worker


@pytest.mark.parametrize("how", ["the server stops", "a worker is lost"])
def test_nobody_looks_at_a_worker_whose_connection_is_closed(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = open_model_file(ROOT / "tests/data/tiny_llama3.gguf")
    context = SETTINGS.max_context
    service = InferenceService(
        ServedModel("tiny", model.tokenizer, model.chat, context, context, created_s=1), Metrics()
    )
    close, looks = WorkerClient.close, list[WorkerClient]()

    async def close_and_look(client: WorkerClient) -> None:
        await close(client)
        if not looks:  # which dials and closes clients of its own
            looks.append(client)
            await service.cluster.look()

    async def scene() -> None:
        async with running_worker("a") as a, running_worker("b") as b:
            addresses = (a.settings.listen, b.settings.listen)
            settings = SessionSettings(addresses, SplitChoice(), SETTINGS, num_tokens=4 * context)
            keeper = Keeper(model, settings, service, Console(file=io.StringIO()), recover_s=0, replan_after_s=60)
            keeping = asyncio.create_task(keeper.keep(None, 0))
            await eventually(lambda: isinstance(service.state, Ready))
            monkeypatch.setattr(WorkerClient, "close", close_and_look)
            if how == "a worker is lost":
                await b.stop()
                await eventually(lambda: bool(looks))
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    with caplog.at_level(logging.ERROR, "lamina.coordinator"):
        run_scene(scene)
    service.close()
    assert looks
    assert not [record for record in caplog.records if "cluster_watch" in record.name]
