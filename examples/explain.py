"""Ask the ops port where a request would go. Nothing is sent to a worker."""

import json
import sys
from urllib.request import Request, urlopen

ops_url = (sys.argv[1:] or ["http://127.0.0.1:8001"])[0]
body = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
with urlopen(f"{ops_url}/workers") as response:
    body["model"] = json.load(response)["workers"][0]["model"]
request = Request(f"{ops_url}/route/explain", json.dumps(body).encode(), {"content-type": "application/json"})
with urlopen(request) as response:
    print(json.dumps(json.load(response), indent=2))
