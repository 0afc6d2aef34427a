from __future__ import annotations

import pytest

from server import config as gateway_config
from server.cli.serve.command import parse


def test_certificates_go_to_the_gateway() -> None:
    config = parse(["--tls-cert", "a.crt", "--tls-key", "a.key", "--gateway-args", "--policy round_robin"])
    assert config.tls
    gateway = gateway_config.parse(["--workers", "dns:w:1", *config.gateway_args])
    assert (gateway.tls_cert, gateway.tls_key, gateway.policy) == ("a.crt", "a.key", "round_robin")
    assert parse(["--gateway-args", "--tls-cert a --tls-key b"]).tls
    assert not parse([]).tls


@pytest.mark.parametrize("half", ["--tls-cert", "--tls-key"])
def test_half_a_pair_is_refused(half: str) -> None:
    with pytest.raises(ValueError, match="--tls-key go together"):
        parse([half, "x"])
