"""`helm test`: every model of the gateway answers a chat, or gives an embedding if it generates no text.

A model that gives neither, as a reranker, is not tried. Needs only the standard library.
"""

import json
import pathlib
import ssl
import sys
import urllib.error
import urllib.request


class NamedContext(ssl.SSLContext):
    """A context that checks the certificate by its own name, not by the Service's."""

    def wrap_socket(self, *args, **options):
        options["server_hostname"] = sys.argv[2]
        return super().wrap_socket(*args, **options)


def context() -> "ssl.SSLContext | None":
    if len(sys.argv) < 3:
        return None
    context = NamedContext(ssl.PROTOCOL_TLS_CLIENT)
    ca = pathlib.Path("/etc/headstart/gateway-ca/ca.crt")
    if ca.exists():
        context.load_verify_locations(ca)
    else:
        context.load_default_certs()
    return context


def call(url: str, body: object = None) -> dict:
    headers = {"content-type": "application/json"}
    key = pathlib.Path("/etc/headstart/test/api-key")
    if key.exists():
        headers["authorization"] = "Bearer " + key.read_text().strip()
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)
    with urllib.request.urlopen(request, timeout=120, context=tls) as answer:
        return json.load(answer)


gateway, tls = sys.argv[1], context()
models = [model["id"] for model in call(gateway + "/v1/models")["data"]]
assert models, "the gateway names no model"
for model in models:
    question = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": "Hello!"}]}
    try:
        answer = call(gateway + "/v1/chat/completions", question)
    except urllib.error.HTTPError as error:
        refusal = error.read().decode()
        if "generates no text" not in refusal:
            sys.exit(f"{model}: {error}: {refusal}")
        if "/v1/embeddings" not in refusal:
            print(model, "is not tried: it gives neither text nor embeddings")
            continue
        answer = call(gateway + "/v1/embeddings", {"model": model, "input": "Hello!"})
        print(model, "gives an embedding of", len(answer["data"][0]["embedding"]), "numbers")
        continue
    assert answer["usage"]["completion_tokens"] > 0, answer
    print(model, "answers:", answer["choices"][0]["message"]["content"])
