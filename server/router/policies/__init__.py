"""The rules by which a worker can be chosen, behind one interface: ours, and those of other gateways.

They are the published rules, re-implemented to be compared with under the same traffic; not their code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from server.router.policies.base import FleetView, Option, Policy
from server.router.policies.dynamo import Dynamo
from server.router.policies.headstart import Headstart
from server.router.policies.llm_d import LlmD
from server.router.policies.sglang import Sglang
from server.router.policies.simple import ConsistentHash, LeastLoad, LongestPrefix, RoundRobin

POLICIES: Final[Mapping[str, Callable[[], Policy]]] = MappingProxyType(
    {
        "headstart": Headstart,
        "longest_prefix": LongestPrefix,
        "round_robin": RoundRobin,
        "least_load": LeastLoad,
        "consistent_hash": ConsistentHash,
        "sglang": Sglang,
        "llm-d": LlmD,
        "dynamo": Dynamo,
    }
)


def make_policy(name: str) -> Policy:
    """A policy with its default constants. Raises ValueError."""
    if name not in POLICIES:
        raise ValueError(f"unknown routing policy {name!r}: use one of {', '.join(POLICIES)}")
    return POLICIES[name]()


__all__ = ["POLICIES", "FleetView", "Option", "Policy", "make_policy"]
