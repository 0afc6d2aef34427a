"""Ask the ops port where a request would go, and what each worker would take. Nothing is sent to a worker."""

import json
import sys
from urllib.request import Request, urlopen

ops_url = (sys.argv[1:] or ["http://127.0.0.1:8001"])[0]
body = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
try:
    with urlopen(f"{ops_url}/workers") as response:
        body["model"] = json.load(response)["workers"][0]["model"]
except (OSError, ValueError) as error:
    sys.exit(f"{ops_url}: {error}: give the URL of the ops port that `headstart serve` prints")
request = Request(f"{ops_url}/route/explain", json.dumps(body).encode(), {"content-type": "application/json"})
with urlopen(request) as response:
    answer = json.load(response)
print(
    f"{answer['prompt_tokens']} prompt tokens would go to {' or '.join(answer['choice'])} (policy {answer['policy']})"
)
print("worker              cached   fetched   queue_s  prefill_s  first_token_s      cost")
for worker in answer["workers"]:
    tokens = (worker["matched_tokens"], sum(worker["fetched_tokens"].values()))
    seconds = (worker["wait_s"] + worker["kv_wait_s"], worker["prefill_s"], worker["predicted_ttft_s"], worker["cost"])
    print("{:16} {:9} {:9} {:9.3f} {:10.3f} {:14.3f} {:9.3f}".format(worker["worker"], *tokens, *seconds))
