"""Another client's request fails, and the next request is not affected."""

import json

from llmcore_devtools import fake_answer, sockets
from llmcore_devtools.faults import fault


def test_others_do_not_notice(llmcore_server):
    server = llmcore_server(plugins=("./mine.py",), faults=True)
    body = {"prompt": "x" + fault("forward"), "max_tokens": 5}
    status, _, answer = sockets.call(server.port, "POST", "/v1/completions", body)
    assert status == 500
    body = {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0}
    status, _, answer = sockets.call(server.port, "POST", "/v1/completions", body)
    text = "".join(chr(33 + token) for token in fake_answer([1, 2, 3], 5))
    assert (status, json.loads(answer)["choices"][0]["text"]) == (200, text)
