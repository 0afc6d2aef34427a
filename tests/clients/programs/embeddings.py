"""python embeddings.py URL MODEL: embeddings through OpenAI's SDK and langchain-openai. Prints one JSON object."""

from __future__ import annotations

import json
import sys

import openai
from langchain_openai import OpenAIEmbeddings

TEXTS = ["Paris is the capital of France.", "The cat sleeps."]


def main(url: str, model: str) -> None:
    client = openai.OpenAI(base_url=url, api_key="unused", max_retries=0)
    answer = client.embeddings.create(model=model, input=TEXTS)
    # Else it cuts texts by OpenAI's own tokens and sends those.
    langchain = OpenAIEmbeddings(base_url=url, api_key="unused", model=model, check_embedding_ctx_length=False)
    found = {
        "sdk": [item.embedding for item in answer.data],
        "floats": client.embeddings.create(model=model, input=TEXTS, encoding_format="float").data[0].embedding,
        "short": client.embeddings.create(model=model, input=TEXTS[0], dimensions=8).data[0].embedding,
        "tokens": answer.usage.prompt_tokens,
        "documents": langchain.embed_documents(TEXTS),
        "query": langchain.embed_query(TEXTS[0]),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
