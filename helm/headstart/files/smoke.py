"""`helm test`: every model that the gateway names answers a chat completion. Standard library alone."""

import json
import pathlib
import sys
import urllib.request


def call(url: str, body: object = None) -> dict:
    headers = {"content-type": "application/json"}
    key = pathlib.Path("/etc/headstart/test/api-key")
    if key.exists():
        headers["authorization"] = "Bearer " + key.read_text().strip()
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=120) as answer:
        return json.load(answer)


gateway = sys.argv[1]
models = [model["id"] for model in call(gateway + "/v1/models")["data"]]
assert models, "the gateway names no model"
for model in models:
    question = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": "Say hello."}]}
    answer = call(gateway + "/v1/chat/completions", question)
    assert answer["usage"]["completion_tokens"] > 0, answer
    print(model, "answers:", answer["choices"][0]["message"]["content"])
