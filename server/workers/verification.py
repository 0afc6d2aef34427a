"""Whether a worker that calls itself one of ours is."""

from __future__ import annotations

import hmac
import logging
from typing import Final

from cache.records import WorkerMember, signature
from cache.types import WorkerId
from server.workers.networks import WorkerNetworks
from worker.wire import OLDEST_PROTOCOL, PROTOCOL_VERSION, shared_protocol

logger = logging.getLogger(__name__)

MAX_VERIFIED: Final = 50_000
MAX_COMPLAINTS: Final = 500


class Vetting:
    """Owned by the gateway's event loop. Remembers what it has verified, and what it has complained of."""

    def __init__(self, cluster_secret: bytes, networks: WorkerNetworks) -> None:
        self._cluster_secret = cluster_secret
        self._networks = networks
        self._complaints: set[tuple[str, str, str]] = set()
        self._verified: dict[WorkerId, tuple[WorkerMember, str | None]] = {}
        """What `_objection` said of the very same object, for it is asked at every decision."""

    def passes(self, member: WorkerMember, namespace: str | None) -> bool:
        """False, and loudly so once, for a worker whose tokens, hashes or secret are not ours.

        `namespace`: that of the member's model, as far as it is known.
        """
        if shared_protocol(member) is None:
            reason = f"it speaks protocol {member.protocol}, this gateway {OLDEST_PROTOCOL} to {PROTOCOL_VERSION}"
        elif (objection := self._objection(member)) is not None:
            reason = objection
        elif namespace is not None and member.namespace != namespace:
            reason = f"its namespace is {member.namespace}, that of {member.model} is {namespace}"
        else:
            return True
        complaint = (member.worker_id, member.epoch, reason)
        if complaint not in self._complaints and len(self._complaints) < MAX_COMPLAINTS:
            self._complaints.add(complaint)
            logger.error("worker %s at %s is refused: %s", member.worker_id, member.url, reason)
        return False

    def _objection(self, member: WorkerMember) -> str | None:
        """What speaks against its address or its signature."""
        kept = self._verified.get(member.worker_id)
        if kept is not None and kept[0] is member:
            return kept[1]
        objection = self._networks.objection(member.url)
        if not hmac.compare_digest(member.secret_check.encode(), signature(self._cluster_secret, member).encode()):
            objection = "its registration is not signed with this gateway's cluster secret"
        if objection is None:
            if len(self._verified) > MAX_VERIFIED:
                self._verified.clear()
            self._verified[member.worker_id] = (member, None)
        return objection
