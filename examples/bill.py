"""Bill tenants by usage logs: tokens at list prices, next to the worker time that they took and that caching saved."""

import json
import sys
from collections import Counter, defaultdict

PRICES = {"uncached": 0.50, "cached": 0.05, "output": 2.00}  # for a million tokens
used = defaultdict(Counter)
for path in sys.argv[1:]:
    with open(path) as log:
        for line in log:
            try:
                request = json.loads(line)
            except ValueError:
                continue  # cut short by a killed gateway
            if request["status"] >= 500:
                continue  # a failure of the service costs its client nothing
            cached = sum(request["cached_tokens"].values())
            amounts = {"uncached": request["prompt_tokens"] - cached, "cached": cached}
            amounts["output"] = request["output_tokens"]
            seconds = {name: request[name] for name in ("prefill_s", "prefill_saved_s", "block_s")}
            used[request["tenant"], request["key"], request["model"]].update(amounts | seconds)
for (tenant, key, model), sums in sorted(used.items()):
    cost = sum(price * sums[name] / 1e6 for name, price in PRICES.items())
    times = (
        f"{sums['prefill_s']:.1f} s of prefill, {sums['prefill_saved_s']:.1f} s saved, {sums['block_s']:.0f} block-s"
    )
    print(f"{tenant:12} {key:12} {model:12} {cost:10.4f}   {times}")
