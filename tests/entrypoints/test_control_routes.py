"""The control API: both families of names, strict bodies, and the HTTP code tells the truth."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fastengine.entrypoints import control_types
from fastengine.entrypoints.control_routes import ROUTES
from fastengine.protocol import control


@pytest.fixture(autouse=True)
def resumed(api):
    api.engine.commands.clear()
    yield
    api.http.post("/v1/resume")


def commands(api: Any) -> list[Any]:
    return [request.command for request in api.engine.commands]


EXPECTED: list[tuple[str, dict[str, Any], Any]] = [
    ("/v1/pause", {}, control.Pause()),
    ("/v1/pause", {"mode": "retract", "timeout_s": 3}, control.Pause(mode="retract", timeout_s=3)),
    ("/v1/resume", {}, control.Resume()),
    ("/v1/is_paused", {}, control.IsPaused()),
    ("/v1/update_weights_from_tensors", {"path": "/dev/shm/x"}, control.UpdateWeightsFromTensors(path="/dev/shm/x")),
    ("/v1/weights_checksum", {}, control.WeightsChecksum()),
    ("/v1/sleep", {}, control.Sleep(timeout_s=600)),
    ("/v1/sleep", {"tags": ["weight"], "timeout_s": 9}, control.Sleep(tags=("weight",), timeout_s=9)),
    ("/v1/sleep", {"tags": "kv_cache, weight"}, control.Sleep(tags=("kv_cache", "weight"), timeout_s=600)),
    ("/v1/wakeup", {}, control.Wakeup()),
    ("/v1/abort_requests", {"req_ids": ["a", "b"]}, control.AbortRequests(req_ids=("a", "b"))),
    ("/v1/abort_requests", {"abort_all": True}, control.AbortRequests(abort_all=True)),
    ("/v1/flush_cache", {}, control.FlushCache()),
    ("/v1/profile", {"action": "start", "output_dir": "/tmp/p"}, control.Profile(action="start", output_dir="/tmp/p")),
    ("/v1/log_level", {"level": "DEBUG"}, control.SetLogLevel(level="DEBUG")),
    ("/v1/server_info", {}, control.GetServerInfo()),
    ("/pause_generation", {"mode": "in_place"}, control.Pause(mode="in_place")),
    ("/continue_generation", {}, control.Resume()),
    ("/abort_request", {"rid": "a"}, control.AbortRequests(req_ids=("a",))),
    ("/abort_request", {"abort_all": True}, control.AbortRequests(abort_all=True)),
    ("/flush_cache", {}, control.FlushCache()),
    ("/release_memory_occupation", {"tags": ["weights"]}, control.Sleep(tags=("weight",), timeout_s=600)),
    ("/resume_memory_occupation", {}, control.Wakeup()),
    ("/start_profile", {}, control.Profile(action="start")),
    ("/stop_profile", {}, control.Profile(action="stop")),
    ("/get_server_info", {}, control.GetServerInfo()),
    ("/server_info", {}, control.GetServerInfo()),
]


@pytest.mark.parametrize(("path", "body", "command"), EXPECTED, ids=str)
def test_each_name_sends_its_command(api, path, body, command):
    reply = api.http.post(path, json=body)
    answer = reply.json()
    assert reply.status_code == 200
    assert answer["status"] == "success"
    assert answer["error"] is None
    assert answer["request_id"]
    assert commands(api) == [command]


def test_every_route_is_tested_above():
    tested = {path for path, _, _ in EXPECTED} | {"/v1/update_weights", "/update_weights_from_disk"}
    assert tested == {route.path for route in ROUTES}


BAD: list[tuple[str, Any, str]] = [
    ("/v1/abort_requests", {}, "req_ids"),
    ("/v1/abort_requests", {"req_ids": []}, "req_ids"),
    ("/v1/abort_requests", {"stop_all": True}, "stop_all"),
    ("/v1/abort_requests", {"req_ids": "x"}, "req_ids"),
    ("/v1/abort_requests", {"req_ids": ["x"], "abort_all": True}, "req_ids"),
    ("/v1/abort_requests", {"req_ids": [5]}, "req_ids"),
    ("/v1/pause", {"mode": "soft"}, "mode"),
    ("/v1/pause", {"timeout_s": -1}, "timeout_s"),
    ("/v1/pause", {"foo\r\n": 1}, "foo"),
    ("/v1/resume", {"mode": "abort"}, "mode"),
    ("/v1/sleep", {"tags": ["unknown"]}, "tags"),
    ("/v1/sleep", {"tags": []}, "tags"),
    ("/v1/update_weights", {"format": "pickle"}, "format"),
    ("/v1/update_weights_from_tensors", {}, "path"),
    ("/update_weights_from_disk", {}, "model_path"),
    ("/abort_request", {}, "rid"),
    ("/abort_request", {"rid": "x", "abort_all": True}, "rid"),
    ("/v1/log_level", {"level": "LOUD"}, "level"),
    ("/v1/profile", {"action": "stop", "output_dir": "/tmp/p"}, "output_dir"),
]


@pytest.mark.parametrize(("path", "body", "field"), BAD, ids=str)
def test_bad_bodies_reach_nobody(api, path, body, field):
    reply = api.http.post(path, json=body)
    answer = reply.json()
    assert reply.status_code == 400
    assert answer["status"] == "error"
    assert answer["result"] is None
    assert field in answer["error"]["param"]
    assert field in answer["error"]["message"]
    assert answer["error"]["code"] == 400
    assert commands(api) == []


@pytest.mark.parametrize("version", ["", "\0", "a\u2028b", "v" * 129, "v\n", " v", "v ", "é"], ids=repr)
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/update_weights", {}, "version"),
        ("/v1/update_weights_from_tensors", {"path": "/dev/shm/x"}, "version"),
        ("/update_weights_from_disk", {"model_path": "/w"}, "weight_version"),
    ],
)
def test_versions_are_short_and_printable(api, path, body, field, version):
    reply = api.http.post(path, json={**body, field: version})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
    assert commands(api) == []


@pytest.mark.parametrize("version", ["v", "step 3", "v" * 128, "a/b:c@{1}"])
def test_versions_that_are_taken(api, version):
    api.http.post("/v1/update_weights_from_tensors", json={"path": "/dev/shm/x", "version": version})
    assert commands(api)[-1].version == version


def test_errors_of_every_kind_have_the_replys_shape(start_server):
    server = start_server(wait=False, control_api_key=("root",))
    for route in ROUTES:
        for method, headers, status in (("POST", {}, 401), ("PUT", {"x-api-key": "root"}, 405)):
            reply = server.http.request(method, route.path, headers=headers)
            answer = reply.json()
            assert (reply.status_code, answer["status"], answer["result"], answer["error"]["code"]) == (status, "error", None, status), route.path
            assert answer["request_id"].startswith("ctl-")
            assert answer.get("success") is (False if route.sglang else None)
            assert (answer.get("message") == answer["error"]["message"]) == route.sglang
        assert reply.headers["allow"] == ", ".join(route.methods)


def test_the_paths_with_this_shape_are_those_of_the_routes():
    assert {route.path for route in ROUTES if not route.sglang} == control_types.PATHS
    assert {route.path for route in ROUTES if route.sglang} == control_types.SGLANG_PATHS


def test_the_schemas_say_so(api):
    document = api.http.get("/openapi.json").json()
    for route in ROUTES:
        for method in route.methods:
            responses = document["paths"][route.path][method.lower()]["responses"]
            name = "SglangReply" if route.sglang else "ControlReply"
            for status in ("200", "4XX", "5XX"):
                assert responses[status]["content"]["application/json"]["schema"] == {"$ref": f"#/components/schemas/{name}"}


def test_the_engines_refusal_has_its_code(api):
    reply = api.http.post("/v1/update_weights", json={"version": "v2"})
    assert reply.status_code == 409
    assert reply.json()["status"] == "error"
    assert "paused" in reply.json()["error"]["message"]
    api.http.post("/v1/pause")
    body = {"version": "v2", "model_path": "/w", "format": "gguf", "verify_checksum": "c", "keep_kv": True, "timeout_s": 5}
    assert api.http.post("/v1/update_weights", json=body).status_code == 200
    assert commands(api)[-1] == msgspec.convert({"type": "update_weights", **body}, control.UpdateWeights)


def test_is_paused_by_get(api):
    assert api.http.get("/v1/is_paused").json()["result"] == {"is_paused": False}
    api.http.post("/v1/pause")
    assert api.http.get("/v1/is_paused").json()["result"] == {"is_paused": True}


@pytest.mark.parametrize("abort", [False, True])
def test_sglangs_update_stops_and_resumes_by_itself(api, abort):
    api.engine.commands.clear()
    body = {"model_path": "/w", "weight_version": "v2", "abort_all_requests": abort}
    reply = api.http.post("/update_weights_from_disk", json=body)
    assert reply.json()["success"] is True
    assert reply.json()["message"]
    # One command, so that no other can come between its parts.
    assert commands(api) == [control.UpdateWeights(model_path="/w", version="v2", stop_first="abort" if abort else "drain")]


def test_an_engine_that_does_not_answer_is_a_504(start_server, monkeypatch):
    server = start_server()
    server.engine.silent_control = True
    monkeypatch.setattr("fastengine.entrypoints.control_routes.ANSWER_MARGIN_S", 0.0)
    reply = server.http.post("/v1/pause", json={"timeout_s": 0.05})
    assert reply.status_code == 504
    assert "pause" in reply.json()["error"]["message"]


def test_no_control_api(start_server):
    server = start_server(control_api=False)
    for route in ROUTES:
        assert server.http.post(route.path, json={}).status_code == 404


def test_the_control_key_is_another(start_server):
    server = start_server(wait=False, api_key=("user",), control_api_key=("root",))

    def status(path: str, key: str) -> int:
        return server.http.post(path, json={}, headers={"Authorization": f"Bearer {key}"}).status_code

    assert status("/v1/resume", "root") == 200
    assert status("/v1/resume", "user") == 401
    assert status("/v1/completions", "root") == 401
    assert status("/v1/completions", "user") in (400, 503)


def test_the_control_api_has_the_users_key_by_default(start_server):
    server = start_server(wait=False, api_key=("user",))
    assert server.http.post("/v1/resume").status_code == 401
    assert server.http.post("/v1/resume", headers={"Authorization": "Bearer user"}).status_code == 200
