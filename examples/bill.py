"""Bill tenants by usage logs: tokens at list prices, next to the worker time that they took and that caching saved."""

import argparse
import json
from collections import Counter, defaultdict

PRICES = {"uncached": 0.50, "cached": 0.05, "output": 2.00}  # for a million tokens
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("logs", nargs="+", help="files of `headstart gateway --usage-log`")
used = defaultdict(Counter)
for path in parser.parse_args().logs:
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
rows = [("tenant", "key", "model", "cost", "prefill s", "saved s", "block-s")]
for owner, sums in sorted(used.items()):
    cost = sum(price * sums[name] / 1e6 for name, price in PRICES.items())
    times = f"{sums['prefill_s']:.1f}", f"{sums['prefill_saved_s']:.1f}", f"{sums['block_s']:.0f}"
    rows.append((*owner, f"{cost:.4f}", *times))
widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
for row in rows:
    texts = [f"{text:{width}}" for text, width in zip(row[:3], widths[:3], strict=True)]
    texts += [f"{text:>{width}}" for text, width in zip(row[3:], widths[3:], strict=True)]
    print("  ".join(texts))
