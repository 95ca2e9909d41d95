"""Health, metrics, models, tokens, errors of no route, the key and the limits."""

from collections.abc import AsyncIterator, Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lamina.coordinator.api.settings import ApiSettings
from lamina.coordinator.api.state import Draining, Loading, Lost, Ready, StageProgress
from lamina.coordinator.model_file import ModelFile
from lamina.spec.errors import WorkerLost
from lamina.wire.version import own_version
from support.scripted import Api, text_script


@pytest.fixture
def api(model: ModelFile) -> Iterator[Api]:
    with Api(model, text_script(model, "fine, thanks")) as api:
        yield api


# -- health


def test_health_while_loading_says_how_far(api: Api) -> None:
    stages = {i: StageProgress(i, f"w{i}", "0-14", done, 100) for i, done in enumerate((50, 100))}
    api.service.state = Loading(stages)
    response = api.get("/health")
    assert response.status_code == 503
    assert response.headers["retry-after"]
    body = response.json()
    assert (body["status"], body["progress"]) == ("loading", 0.75)
    assert body["stages"][0] == {
        "stage": 0,
        "worker": "w0",
        "layers": "0-14",
        "done_bytes": 50,
        "total_bytes": 100,
    }
    api.service.state = Loading(waiting_for="worker 10.0.0.2:50051")
    assert api.get("/health").json()["waiting_for"] == "worker 10.0.0.2:50051"


@pytest.mark.parametrize("path", ["/health", "/health/ready"])
def test_health_of_each_state(api: Api, path: str) -> None:
    assert (api.get(path).status_code, api.get(path).json()) == (200, {"status": "ok"})
    for state, status in ((Loading(), "loading"), (Lost("w1 is gone"), "unavailable"), (Draining(), "draining")):
        api.service.state = state
        response = api.get(path)
        assert (response.status_code, response.json()["status"]) == (503, status)
        assert api.get("/health/live").status_code == 200


def test_a_lost_stage_is_named(api: Api) -> None:
    """C-18: the coordinator stays up, says what is missing, refuses what it cannot serve."""
    api.pipeline.fail(WorkerLost("worker w1 at 10.0.0.2:50051 (layers 15-29): ended the step stream"))
    api.run(api.engine.wait_for_failure())
    assert "w1" in api.get("/health").json()["reason"]
    response = api.chat()
    assert response.status_code == 503
    assert "layers 15-29" in response.json()["error"]["message"]


@pytest.mark.parametrize("state", [Loading(), Draining(), Lost("x")])
def test_requests_before_and_after_get_503_with_retry_after(api: Api, state: object) -> None:
    api.service.state = state  # type: ignore[assignment]
    for response in (api.chat(), api.complete()):
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
        assert response.json()["error"]["type"] == "service_unavailable_error"


# -- errors of routes


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/other", 404),
        ("POST", "/v1/embeddings", 400),
    ],
)
def test_errors_have_openais_shape_everywhere(api: Api, method: str, path: str, status: int) -> None:
    response = api.request(method, path, json={} if method == "POST" else None)
    assert response.status_code == status
    assert set(response.json()) == {"error"}
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"


def test_embeddings_are_refused_clearly(api: Api) -> None:
    assert "no embeddings" in api.post("/v1/embeddings", {"input": "x"}).json()["error"]["message"]


def test_a_defect_is_a_500_without_its_details(api: Api) -> None:
    def broken() -> bytes:
        raise RuntimeError("secret")

    api.service.metrics.exposition = broken  # type: ignore[method-assign]
    response = api.get("/metrics")
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "internal error: RuntimeError"


# -- models, tokens, version


def test_models(api: Api) -> None:
    (entry,) = api.get("/v1/models").json()["data"]
    assert (entry["id"], entry["object"], entry["max_model_len"]) == ("scripted", "model", 256)
    assert api.get("/v1/models/scripted").json() == entry


def test_tokenize_and_back(api: Api, model: ModelFile) -> None:
    text = "Hello <|im_end|> wörld"
    answer = api.post("/tokenize", {"content": text}).json()
    assert answer["tokens"] == model.tokenizer.encode(text, add_special=False, parse_special=True)
    assert answer["count"] == len(answer["tokens"])
    assert api.post("/tokenize", {"prompt": text, "parse_special": False}).json()["count"] > answer["count"]
    assert api.post("/detokenize", {"tokens": answer["tokens"]}).json()["content"] == text
    pieces = api.post("/tokenize", {"content": "Hello", "with_pieces": True}).json()["tokens"]
    assert pieces == [{"id": answer["tokens"][0], "piece": "Hello"}]
    messages = [{"role": "user", "content": "Hi"}]
    assert api.post("/tokenize", {"messages": messages}).json()["tokens"] == model.chat.encode(messages)


@pytest.mark.parametrize("body", [{}, {"content": "a", "prompt": "b"}, {"content": 1}, {"content": "a", "x": 1}])
def test_a_wrong_tokenize_is_a_400(api: Api, body: dict[str, object]) -> None:
    assert api.post("/tokenize", body).status_code == 400


def test_detokenize_of_no_token_is_a_400(api: Api) -> None:
    assert api.post("/detokenize", {"tokens": [10**7]}).status_code == 400


def test_version(api: Api) -> None:
    assert api.get("/version").json()["schema"] == own_version().schema_digest.hex()


def test_the_openapi_document_describes_bodies(api: Api) -> None:
    paths = api.get("/openapi.json").json()["paths"]
    schema = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages", "temperature", "tools"} <= set(schema["properties"])


# -- metrics


def metrics_of(api: Api) -> dict[str, float]:
    """Samples by name and labels; fails if the text is not what Prometheus reads."""
    samples = {}
    for family in text_string_to_metric_families(api.get("/metrics").text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def test_metrics_count_what_happened(api: Api) -> None:
    before = metrics_of(api)
    assert before["lamina_generation_tokens_total"] == 0
    usage = api.chat(temperature=0).json()["usage"]
    api.chat(temperature=0, max_tokens=2)
    after = metrics_of(api)
    assert after["lamina_generation_tokens_total"] == usage["completion_tokens"] + 2
    assert after["lamina_prompt_tokens_total"] == 2 * usage["prompt_tokens"]
    assert after["lamina_request_success_total{finished_reason=stop}"] == 1
    assert after["lamina_request_success_total{finished_reason=length}"] == 1
    assert after["lamina_prefix_cache_queries_total"] == 2 * usage["prompt_tokens"]
    assert after["lamina_prefix_cache_hits_total"] == usage["prompt_tokens"] // 16 * 16
    for name, count in (
        ("time_to_first_token", 2),
        ("e2e_request_latency", 2),
        ("request_queue_time", 2),
        ("request_prefill_time", 2),
        ("request_decode_time", 2),
        ("inter_token_latency", usage["completion_tokens"] - 1 + 1),
    ):
        assert after[f"lamina_{name}_seconds_count"] == count, name
        assert after[f"lamina_{name}_seconds_bucket{{le=+Inf}}"] == count, name
    assert after["lamina_num_requests_running"] == after["lamina_num_requests_waiting"] == 0
    assert after["lamina_kv_cache_usage_ratio"] == 0
    blocks = {state: after[f"lamina_kv_cache_blocks{{state={state}}}"] for state in ("used", "cached", "free")}
    assert blocks["used"] == after["lamina_kv_cache_promised_blocks"] == 0
    assert blocks["cached"] >= usage["prompt_tokens"] // 16
    assert sum(blocks.values()) == sum(
        before[f"lamina_kv_cache_blocks{{state={state}}}"] for state in ("used", "cached", "free")
    )


def test_counters_survive_another_engine(api: Api) -> None:
    api.chat(temperature=0)
    before = metrics_of(api)["lamina_prefix_cache_queries_total"]
    api.service.state = Lost("gone")
    assert metrics_of(api)["lamina_prefix_cache_queries_total"] == before
    api.service.state = Ready(api.engine)
    assert metrics_of(api)["lamina_prefix_cache_queries_total"] >= before


def test_the_cluster_for_people(api: Api) -> None:
    api.chat(temperature=0)
    cluster = api.get("/admin/cluster").json()
    assert cluster["model"] == "scripted"
    assert cluster["state"] == {"status": "ok"}
    assert cluster["num_requests_running"] == 0
    assert {"workers", "stages", "links", "epoch", "tokens_per_s"} <= set(cluster)


# -- key and limits


def test_with_a_key_everything_but_health_wants_it(model: ModelFile) -> None:
    with Api(model, text_script(model, "ok"), settings=ApiSettings(api_key="s3cret")) as api:
        for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/nothing"), ("POST", "/tokenize")):
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}):
                response = api.request(method, path, headers=headers)
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/health/live", "/health/ready"):
            assert api.get(path).status_code == 200
        assert api.get("/v1/models", headers={"authorization": "Bearer s3cret"}).status_code == 200


def test_cors_is_off(api: Api) -> None:
    response = api.request(
        "OPTIONS", "/v1/models", headers={"origin": "http://evil", "access-control-request-method": "GET"}
    )
    assert response.status_code == 405
    assert not any(name.startswith("access-control") for name in response.headers)


def test_a_body_beyond_the_limit_is_a_413_before_it_is_read(model: ModelFile) -> None:
    """With a declared length nothing is read; without one it stops at the limit."""
    with Api(model, text_script(model, "ok"), settings=ApiSettings(max_body_bytes=1000)) as api:
        assert api.chat(messages=[{"role": "user", "content": "x" * 2000}]).status_code == 413
        num_read = 0

        async def pieces() -> AsyncIterator[bytes]:
            nonlocal num_read
            for _ in range(100):
                num_read += 1
                yield b"x" * 100

        headers = {"content-type": "application/json"}
        response = api.request("POST", "/v1/completions", content=pieces(), headers=headers)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"
        assert num_read <= 12
