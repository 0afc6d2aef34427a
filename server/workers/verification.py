"""Checks whether a member of the registry is one of this gateway's workers."""

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


class MemberVerifier:
    """Verifies members by protocol, address, signature and namespace. Owned by the gateway's event loop."""

    def __init__(self, cluster_secret: bytes, networks: WorkerNetworks) -> None:
        self._cluster_secret = cluster_secret
        self._networks = networks
        self._complaints: set[tuple[str, str, str]] = set()
        self._verified: dict[WorkerId, WorkerMember] = {}
        """Members, by identity, whose address and signature are right: they are checked at every decision."""

    def accepts(self, member: WorkerMember, namespace: str | None) -> bool:
        """Return whether to use the worker; log each reason against it once.

        `namespace` is that of the member's model, if it is known.
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
        """Return why the member's address or signature is wrong, or None."""
        if self._verified.get(member.worker_id) is member:
            return None
        if not hmac.compare_digest(member.secret_check.encode(), signature(self._cluster_secret, member).encode()):
            return "its registration is not signed with this gateway's cluster secret"
        objection = self._networks.objection(member.url)
        if objection is None:
            if len(self._verified) > MAX_VERIFIED:
                self._verified.clear()
            self._verified[member.worker_id] = member
        return objection
