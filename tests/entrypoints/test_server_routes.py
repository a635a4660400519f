"""Health, metrics, version, models, keys, and the documentation of it all."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest

from tests.frontend.harness import model_text
from tests.server import wait_until


def test_health_says_what_is_true(start_server):
    gate = threading.Event()

    def slow_load():
        gate.wait(5)
        return model_text()

    server = start_server(wait=False, load=slow_load)
    reply = server.http.get("/health")
    assert reply.status_code == 503
    assert reply.json()["state"] == "starting"
    assert reply.headers["retry-after"]
    gate.set()
    server.wait_ready()
    for state, status in (("recovering", 503), ("stopping", 503), ("failed", 503), ("starting", 503), ("ready", 200)):
        server.engine.set_state(state)
        server.on_loop(lambda: None)
        while server.http.get("/health").json()["state"] != state:
            pass
        assert server.http.get("/health").status_code == server.http.get("/ping").status_code == status


def test_a_paused_engine_is_healthy_but_does_not_generate(start_server):
    server = start_server()
    assert server.http.get("/health_generate").status_code == 200
    assert server.engine.generated[-1].sampling.max_tokens == 1
    server.http.post("/v1/pause")
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/health").json()["paused"] is True
    assert server.http.get("/health_generate").status_code == 503
    server.http.post("/v1/resume")
    assert server.http.get("/health_generate").status_code == 200


def test_metrics_are_exact_from_any_api_process(start_server):
    first = start_server()
    second = start_server(engine=False, index=1, runtime=first.runtime, wait=False)
    for server, times in ((first, 3), (second, 2)):
        for _ in range(times):
            server.http.get("/v1/models")
    second.http.get("/v1/models/none")
    for server in (first, second):
        lines = server.http.get("/metrics").text.splitlines()
        assert 'fastengine:http_requests_total{route="/v1/models",status="200"} 5' in lines
        assert 'fastengine:http_requests_total{route="/v1/models/{name:path}",status="404"} 1' in lines
        assert "fastengine:num_requests_running 0" in lines
        assert "fastengine:engine_up 1" in lines


def test_load_is_that_of_all_processes_from_any_of_them(start_server):
    first = start_server()
    second = start_server(engine=False, index=1, runtime=first.runtime, wait=False).wait_ready()
    first.engine.step_s = 0.01
    long = {"prompt": "x", "max_tokens": 4000, "stream": True}

    def loads() -> list[list[tuple[int, int]]]:
        """As each of the two says: in all, the first's, the second's."""
        seen = [server.http.get("/load").json() for server in (first, second)]
        assert [load["server_load"] for load in seen] == [load["streams"] for load in seen]
        assert [[row["api_worker"] for row in load["api_workers"]] for load in seen] == [[0, 1]] * 2
        return [[(row["streams"], row["sequences"]) for row in (load, *load["api_workers"])] for load in seen]

    idle = [[(0, 0)] * 3] * 2
    assert loads() == idle
    with contextlib.ExitStack() as running:
        for server, fields in ((first, {}), (second, {}), (second, {"n": 3})):
            reply = running.enter_context(server.http.stream("POST", "/v1/completions", json={**long, **fields}))
            assert reply.status_code == 200
        assert loads() == [[(3, 5), (1, 1), (2, 4)]] * 2
    wait_until(lambda: loads() == idle, 10, "the end of all requests")
    # What a dead process had open is no load.
    np.array([2**22 + 1, 7, 7], "<i8").tofile(first.runtime.file("load.1"))
    assert first.http.get("/load").json()["api_workers"] == [{"api_worker": 0, "streams": 0, "sequences": 0}]


def test_metrics_without_an_engine(start_server, monkeypatch):
    monkeypatch.setattr("fastengine.entrypoints.server_routes.METRICS_TIMEOUT_S", 0.05)
    server = start_server(engine=False, wait=False)
    reply = server.http.get("/metrics")
    assert reply.status_code == 200
    assert "fastengine:engine_up 0" in reply.text
    assert reply.headers["content-type"].startswith("text/plain")


def test_version_and_config(api):
    version = api.http.get("/version").json()
    assert version["version"]
    assert version["engine"] == {"version": "1", "device": "cpu", "compiled_ops": {"rms_norm": "compiled"}}
    assert api.http.get("/config-info").json()["max_num_seqs"] == 64


def test_secrets_are_not_shown(start_server):
    server = start_server(wait=False, api_key=("secret-key",))
    reply = server.http.get("/config-info", headers={"Authorization": "Bearer secret-key"})
    assert reply.json()["api_key"] == "***"
    assert "secret-key" not in reply.text


def test_models(api):
    (card,) = api.http.get("/v1/models").json()["data"]
    assert card["id"] == "tiny"
    assert card["max_model_len"] == 4096
    assert card["weight_version"] == "v1"
    assert api.http.get("/v1/models/tiny").json() == card == api.http.get("/v1/models/default").json()
    assert [model.id for model in api.sdk.models.list()] == ["tiny"]


@pytest.mark.parametrize("header", [None, "Bearer", "Bearer wrong", "Basic right", "Bearer right2", "Bearer rightright"])
def test_wrong_keys(start_server, header):
    server = start_server(wait=False, api_key=("right", "other"))
    reply = server.http.get("/v1/models", headers={} if header is None else {"Authorization": header})
    assert reply.status_code == 401
    assert reply.json()["error"]["code"] == "invalid_api_key"
    assert reply.headers["www-authenticate"] == "Bearer"
    assert server.http.get("/v1/none").status_code == 401
    for key in ("right", "other"):
        assert server.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
    assert server.http.get("/health").status_code in (200, 503)


def test_headers_have_a_limit(api):
    assert api.http.get("/v1/models", headers={"x": "y" * 70_000}).status_code == 431


def test_cors_is_off_unless_asked_for(start_server, api):
    origin = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in api.http.options("/v1/chat/completions", headers=origin).headers
    server = start_server(wait=False, cors_origins=("https://app.example",), api_key=("k",))
    reply = server.http.options("/v1/chat/completions", headers=origin)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == "https://app.example"


def test_the_documentation_shows_the_schemas(api):
    document = api.http.get("/openapi.json").json()
    assert api.http.get("/docs").status_code == 200
    for path, name in (("/v1/chat/completions", "ChatCompletionRequest"), ("/v1/completions", "CompletionRequest"), ("/v1/pause", "PauseBody")):
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{name}"}
    schemas = document["components"]["schemas"]
    assert schemas["ChatCompletionRequest"]["properties"]["temperature"]["description"]
    missing = set(refs(document)) - {f"#/components/schemas/{name}" for name in schemas}
    assert not missing
    operations = [o["operationId"] for path in document["paths"].values() for o in path.values()]
    assert len(operations) == len(set(operations))


def refs(node: object) -> list[str]:
    if isinstance(node, dict):
        return [v for k, v in node.items() if k == "$ref"] + [r for v in node.values() for r in refs(v)]
    if isinstance(node, list):
        return [r for v in node for r in refs(v)]
    return []


@pytest.mark.parametrize("origins", [(), ("https://app.example",), ("*",)])
def test_pages_of_other_sites_can_not_have_a_browser_call(start_server, origins) -> None:
    """Not even without reading the answer: simple requests are sent without asking first."""
    server = start_server(wait=False, cors_origins=origins)
    evil = {"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example", "Content-Type": "text/plain"}
    calls = [("POST", "/v1/completions"), ("POST", "/v1/pause"), ("GET", "/v1/is_paused"), ("POST", "/tokenize")]
    for method, path in calls:
        replies = {
            "evil": server.http.request(method, path, headers=evil),
            "friend": server.http.request(method, path, headers=evil | {"Origin": "https://app.example"}),
            "own page": server.http.request(method, path, headers=evil | {"Sec-Fetch-Site": "same-origin"}),
            "no browser": server.http.request(method, path),
        }
        refused = {name for name, reply in replies.items() if reply.status_code == 403}
        assert refused == ({"evil", "friend"} if not origins else {"evil"} if origins != ("*",) else set())
        if "evil" in refused:
            assert "--cors-origins" in replies["evil"].text
    assert server.http.get("/docs", headers=evil).status_code == 200  # a link to it
