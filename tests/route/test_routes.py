"""LMDeploy's protocol of nodes, health, models, and who may change nodes."""

from __future__ import annotations

import json
import socket
from urllib.parse import quote

import pytest
from llmcore.api import ConfigError
from llmcore_route.server import Router, Settings
from routed import First, Got, node, routed, until, whole

CHAT = "/v1/chat/completions"


def test_nodes_come_and_go_as_with_lmdeploy() -> None:
    with node({CHAT: whole()}) as one, routed() as router:
        assert router.get("/nodes/status") == (200, {})
        assert router.add(one.url, ["m", "n"], speed=3) == (200, "Added successfully")
        status = {"role": 1, "models": ["m", "n"], "unfinished": 0, "latency": [], "speed": 3.0, "ready": True}
        assert router.get("/nodes/status") == (200, {one.url: status})
        assert [model["id"] for model in router.get("/v1/models")[1]["data"]] == ["m", "n"]
        assert router.post("/nodes/remove", {"url": one.url}) == (200, "Deleted successfully")
        assert router.get("/nodes/status") == (200, {})
        assert router.post("/nodes/remove", {"url": one.url})[0] == 404
        router.add(one.url)
        assert router.post(f"/nodes/remove?node_url={one.url}", {}) == (200, "Deleted successfully")


def test_a_node_that_declares_no_model_is_asked() -> None:
    listed = whole(body=b'{"data": [{"id": "a"}, {"id": "b"}]}')
    with node({"/v1/models": listed}) as one, node() as two, routed() as router:
        assert router.post("/nodes/add", {"url": one.url}) == (200, "Added successfully")
        assert router.get("/nodes/status")[1][one.url]["models"] == ["a", "b"]
        status, answer = router.post("/nodes/add", {"url": two.url})
        assert status == 400 and "Failed to add" in answer["error"]["message"]


def test_a_node_may_register_before_it_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved, routed(health_timeout=0.2) as router:
        url = f"http://127.0.0.1:{reserved.getsockname()[1]}"
        assert router.add(url) == (200, "Added successfully")
        assert router.get("/readiness")[0] == 503
        assert router.post(CHAT, {"model": "m"})[0] == 503


def test_models_and_nodes_that_are_not_there() -> None:
    with node() as one, routed() as router:
        status, headers, _ = router.send("POST", CHAT, b'{"model": "m"}')
        assert (status, headers["retry-after"]) == (503, "2")
        assert router.get("/health")[0] == 503
        router.add(one.url)
        assert router.get("/health") == (200, {"status": "ok"})
        status, answer = router.post(CHAT, {"model": "other"})
        assert status == 404 and answer["error"]["code"] == "model_not_found"
        assert answer["error"]["message"] == "No node serves the model 'other'; there are m."
        assert router.get("/v1/models/other")[0] == 404
        one.healthy = False
        until(lambda: not router.router.nodes.ready)
        assert router.post(CHAT, {"model": "m"})[0] == 503
        assert router.post(CHAT, {"model": "other"})[0] == 404
        one.healthy = True
        until(lambda: router.router.nodes.ready)
        assert router.get("/liveness")[0] == 200


def test_a_server_sees_whether_it_has_to_register_again() -> None:
    """Not after it was removed, else nobody could remove it."""
    with node() as one, routed() as router:
        asked = f"/nodes/status?url={quote(one.url, safe='')}"
        assert router.get(asked) == (200, {})
        router.add(one.url)
        assert router.get(asked) == router.get("/nodes/status")
        router.post("/nodes/remove", {"url": one.url})
        assert router.get(asked) == (200, {one.url: None})
        assert router.get("/nodes/status") == (200, {})
        router.add(one.url)
        assert router.get(asked)[1][one.url]["models"] == ["m"]


def test_a_node_without_health_is_asked_for_ready() -> None:
    missing = whole("404 Not Found")
    with node({"/health": missing, "/ready": whole()}) as one, routed() as router:
        router.add(one.url)
        assert router.get("/health")[0] == 200


def test_only_the_admin_key_opens_nodes() -> None:
    with node() as one, routed(admin_key="admin", api_keys=("client",), route_nodes=()) as router:
        body = {"url": one.url, "status": {"models": ["m"]}}
        for headers in ({}, {"Authorization": "Bearer client"}):
            assert router.post("/nodes/add", body, **headers)[0] == 401
            assert router.get("/nodes/status", **headers)[0] == 401
        assert router.post("/nodes/add", body, Authorization="Bearer admin")[0] == 200
        assert router.get("/v1/models", Authorization="Bearer admin")[0] == 401
        assert router.get("/health")[0] == 200


def test_without_one_the_address_decides() -> None:
    with node() as one, routed(route_nodes=("192.0.2.1",)) as router:
        status, answer = router.add(one.url)
        assert status == 403 and "--route_nodes" in answer["error"]["message"]
        assert router.get("/nodes/status")[0] == 403
    with node() as one, routed(route_nodes=("localhost",)) as router:
        assert router.get("/nodes/status", Origin="http://evil.test")[0] == 403


def test_nothing_below_nodes_reaches_a_node() -> None:
    with node({"/nodes/terminate": whole()}) as one, routed() as router:
        router.add(one.url)
        status, answer = router.post("/nodes/terminate", {"url": one.url})
        assert status == 404 and "/nodes/add" in answer["error"]["message"]
        assert not one.seen()


@pytest.mark.parametrize(
    ("url", "status"),
    [
        ("ftp://127.0.0.1:1", 400),
        ("file:///etc/passwd", 400),
        ("http://", 400),
        ("127.0.0.1:80", 400),
        ("http://user:pw@127.0.0.1", 400),
        ("http://127.0.0.1:1/?q", 400),
        ("http://127.0.0.1\\@evil.test", 400),
        ("http://0.0.0.0:23333", 400),
        ("http://[::]:23333", 400),
        ("http://169.254.169.254/latest", 400),
        ("http://[::ffff:169.254.169.254]/", 400),
        ("http://[fe80::1]/", 400),
        ("http://2852039166/", 400),
        ("http://[fd00:ec2::254]/", 400),
        ("http://224.0.0.1/", 400),
        ("http://name.invalid:80", 400),
    ],
)
def test_urls_that_are_no_nodes(url: str, status: int) -> None:
    with routed(admin_key="k", route_nodes=()) as router:
        body = {"url": url, "status": {"models": ["m"]}}
        found, answer = router.post("/nodes/add", body, Authorization="Bearer k")
        assert (found, router.router.nodes.status()) == (status, {}), answer


def test_a_listed_port_is_the_only_one() -> None:
    with node() as one, node() as two, routed(route_nodes=(one.url[7:],)) as router:
        assert router.add(one.url)[0] == 200
        assert router.add(two.url)[0] == 403
        assert router.add("http://localhost:1")[0] == 403


def test_roles_that_split_a_request_are_refused() -> None:
    with node() as one, routed() as router:
        for role in (2, "Prefill"):
            status, answer = router.add(one.url, role=role)
            assert status == 400 and "--role Hybrid" in answer["error"]["message"]
        assert router.post("/nodes/add", {"no": 1})[0] == 400
        assert router.add(one.url, role="Hybrid", speed=-1)[0] == 200


def test_somebody_must_be_allowed_to_add_nodes() -> None:
    with pytest.raises(ConfigError, match=r"--route_nodes.*--admin_key"):
        Router(Settings(port=0), First())
    with pytest.raises(ConfigError, match=r"--route_nodes a/b: write HOST"):
        Router(Settings(port=0, route_nodes=("a/b",)), First())


def test_lmdeploys_client() -> None:
    """The requests of lmdeploy.serve.openai.api_client.APIClient, sent by the library that it uses."""
    requests = pytest.importorskip("requests")
    events = b'data: {"n": 1}\n\ndata: {"n": 2}\n\ndata: [DONE]\n\n'

    def chat(got: Got) -> None:
        if json.loads(got.body)["stream"]:
            head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
            got.connection.sendall(head + events)
        else:
            whole(body=b'{"choices": []}')(got)

    with node({CHAT: chat}) as one, routed() as router:
        router.add(one.url)
        base = f"http://127.0.0.1:{router.port}"
        listed = requests.get(f"{base}/v1/models", timeout=10)
        assert [item["id"] for item in json.loads(listed.text).pop("data", [])] == ["m"]
        load = {"model": "m", "messages": "hi", "temperature": 0.7, "top_p": 1.0, "n": 1, "max_tokens": 512}
        load |= {"stop": None, "stream": False, "session_id": -1, "ignore_eos": False, "kwargs": {}}
        headers = {"content-type": "application/json"}
        plain = requests.post(f"{base}{CHAT}", headers=headers, json=load, stream=False, timeout=10)
        assert [*plain.iter_lines(chunk_size=8192, delimiter=b"\n")] == [b'{"choices": []}']
        streamed = requests.post(
            f"{base}{CHAT}", headers=headers, json=load | {"stream": True}, stream=True, timeout=10
        )
        lines = [line for line in streamed.iter_lines(chunk_size=8192, delimiter=b"\n") if line]
        assert lines == [b'data: {"n": 1}', b'data: {"n": 2}', b"data: [DONE]"]


def test_a_node_that_registers_again_is_asked_at_once() -> None:
    with node(healthy=False) as one, routed(health_interval=60.0) as router:
        router.add(one.url)
        assert router.get("/health")[0] == 503
        one.healthy = True
        router.add(one.url, ["n"])
        assert router.get("/health")[0] == 200
        assert router.router.nodes.status()[one.url]["models"] == ["n"]


def test_other_names_of_the_machine_are_listed() -> None:
    with routed() as router, routed(allowed_hosts=("llm.test",)) as open_router:
        for path in ("/v1/models", "/nodes/status"):
            status, answer = router.get(path, Host="llm.test")
            assert status == 403 and "--allowed_hosts" in answer["error"]["message"]
            assert open_router.get(path, Host="llm.test")[0] == 200
