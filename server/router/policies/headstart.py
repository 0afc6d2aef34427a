"""The least cost in seconds: see `server.router.cost`.

With several gateways one thing is added. What others sent since a worker's last report is unknown, and every gateway
sees the same idle workers and breaks ties the same way, so they would all take the same one. Costs therefore get a
random part as large as the report is old. Simulated with 4 gateways on the conversations, mean TTFT with reports
50 / 250 / 1,000 ms old: 1.47 / 1.60 / 2.01 s without it, 1.43 / 1.52 / 1.74 s with it, one gateway 1.39 s.

A client's `prompt_cache_key` says that its requests share a prefix, also where the index cannot know it yet: the first
ones of a conversation by several gateways, or all of them while Redis is away. It is a hint: the key's own worker is
preferred as far as a small part of the prefill is worth, so a match or a queue of any weight outdoes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from server.router.placement import RouteRequest
from server.router.policies.base import FleetView, Option, StatelessPolicy
from server.router.policies.rendezvous import weights

AFFINITY: Final = 0.1
"""What being the key's worker is worth, of the prefill of the whole prompt."""


class Headstart(StatelessPolicy):
    def scores(self, request: RouteRequest, options: Sequence[Option], fleet: FleetView) -> Sequence[float]:
        beta = fleet.cost.beta(fleet.recent_s, fleet.num_workers)
        cost_s = fleet.cost.cost_s
        costs_s = [
            cost_s(option.wait_s + option.room_s, option.own_s, option.recent_s, beta + option.num_delayed)
            + (option.unseen_s * fleet.draw() if option.unseen_s else 0.0)
            for option in options
        ]
        if request.affinity_key:
            keyed = weights(request.affinity_key.encode(), options)
            at = keyed.index(min(keyed))
            costs_s[at] -= AFFINITY * request.num_prompt_tokens / options[at].prefill_tokens_per_s
            # Keys spread by themselves, and every gateway must find the same worker, whatever it has sent lately.
            least_recent_s = min(option.recent_s for option in options)
            costs_s[at] -= fleet.cost.recent_weight * (options[at].recent_s - least_recent_s)
        return costs_s
