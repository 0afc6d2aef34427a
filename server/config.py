"""The options of a gateway."""

from __future__ import annotations

import argparse
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Final

from jinja2 import TemplateError

from server.auth.authentication import TENANT_HEADER
from server.router.policies import POLICIES
from server.text.formats import FORMATS
from server.text.formats.reasoning import THOUGHT_FORMATS
from server.text.output_parser import THOUGHT_FIELDS
from server.text.template_sandbox import TemplateEnvironment
from server.workers.networks import DEFAULT_NETWORKS, WorkerNetworks
from worker.common.command_line import CommandParser, read_secret
from worker.common.options import MAX_PORT, SharedConfig, json_object, make_parser, num_bytes, option, template_text

NO_REASONING: Final = "none"
_HOST_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,253}")
_IMAGE_HOST: Final = re.compile(r"(?:[A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")
_XARG: Final = re.compile(r"(?!(?:kv|ec)_)[A-Za-z_][A-Za-z0-9_.-]{0,63}", re.IGNORECASE)
_HEADER: Final = re.compile(
    r"x-(?!(?:api-key|request-id|forwarded-.*|real-ip|headstart-(?!tenant$).*)$)[a-z0-9-]{1,60}", re.IGNORECASE
)
_ORIGIN: Final = re.compile(r"\*|[a-z][a-z0-9+.-]*://[A-Za-z0-9._\[\]:-]{1,260}")
_WEB_PAGE: Final = re.compile(r"https?://[^\s/]+(?:/\S*)?")


_net = partial(option, "network")
_fleet = partial(option, "workers")
_api = partial(option, "API")
_watch = partial(option, "observability")


def _hosts(text: str) -> list[str]:
    return text.lower().split(",")


def model_alias(text: str) -> tuple[str, str]:
    """Parse `NAME=MODEL`."""
    name, equals, model = text.partition("=")
    if not (name and equals and model):
        raise argparse.ArgumentTypeError(f"NAME=MODEL is needed, got {text!r}")
    return name, model


def _model_template(text: str) -> tuple[str, str]:
    """Parse `[MODEL=]FILE`, and read the file. An empty name stands for every model."""
    name, equals, file = text.partition("=")
    return (name, template_text(file)) if equals and not Path(text).is_file() else ("", template_text(text))


def _model_kwargs(text: str) -> tuple[str, dict[str, Any]]:
    """Parse `[MODEL=]JSON`. An empty name stands for every model."""
    name, brace, rest = text.partition("{")
    return name.removesuffix("="), json_object(brace + rest)


@dataclass(frozen=True, slots=True)
class GatewayConfig(SharedConfig):
    """Raises ValueError that names the option."""

    host: str = _net("127.0.0.1", "address of the public port (default 127.0.0.1)")
    port: int = _net(8000, "public port: the OpenAI API and health (default 8000)", least=0, most=MAX_PORT)
    ops_host: str = _net("127.0.0.1", "address of the ops port (default 127.0.0.1)")
    ops_port: int = _net(8001, "ops port: metrics, workers, explain (default 8001)", least=0, most=MAX_PORT)
    ops_hosts: tuple[str, ...] = _net(
        (),
        "names that the ops port answers to, next to addresses and localhost (default: --ops-host)",
        "NAME,...",
    )
    share_port: bool = _net(False, "let other gateways listen on the public port too (SO_REUSEPORT)")
    max_body_bytes: int = _net(32 << 20, "largest body of a request (default 32M)", "SIZE", type=num_bytes)
    header_timeout_s: float = _net(10.0, "time for the head of a request (default 10)")
    body_timeout_s: float = _net(30.0, "time for each 30 KiB of a body (default 30)")
    max_connections: int = _net(8192, "open connections of each port (default 8192)")
    ops_key_file: str | None = _net(
        None,
        "key that drain, purge and explanations for a tenant ask for, on loopback too"
        " (default: none; then only a loopback ops port allows them)",
        "FILE",
    )
    request_timeout_s: float = _net(3600.0, "longest time of a request (default 3600)")
    ping_s: float = _net(
        10.0, "silence after which a stream gets a comment, as balancers close silent ones (default 10)"
    )
    drain_notice_s: float = _net(
        15.0,
        "time after SIGTERM in which it is not ready and still serves, so that balancers notice (default 15)",
        least=0,
    )
    keep_alive_s: float = _net(
        620.0, "time that an idle connection is kept: longer than a balancer in front (default 620)"
    )
    stall_s: float = _net(5.0, "silence after which a stream's worker is probed (default 5)")
    max_queued_tokens: int = _net(1 << 22, "prompt tokens that may wait (default 4M)")
    workers: tuple[str, ...] = _fleet(
        (), "workers that need no registry: http://HOST:PORT or dns:NAME:PORT", "URL", nargs="+", type=str
    )
    worker_networks: tuple[str, ...] = _fleet(
        DEFAULT_NETWORKS,
        "networks that workers may be in (default: loopback and private addresses)",
        "CIDR,...",
    )
    hold_s: float = _fleet(
        3.0, "a request that would wait longer at its worker waits at the gateway; 0: none does (default 3)", least=0
    )
    scale_objective_s: float = _fleet(
        3.0, "wait of a queue that is short enough: what waits longer raises `headstart_workers_needed` (default 3)"
    )
    max_copies: int = _fleet(
        4, "copies of hot prefixes to other workers that are made at a time; 0: none (default 4)", least=0
    )
    policy: str = _fleet("headstart", "routing policy (default headstart)", choices=tuple(POLICIES))
    max_images: int = _api(32, "images of a request, for engines that take them; 0: none (default 32)", least=0)
    max_image_bytes: int = _api(
        20 << 20, "largest image, decoded (default 20M)", "SIZE", flag="--max-image-bytes", type=num_bytes
    )
    image_hosts: frozenset[str] = _api(
        frozenset(),
        "hosts of image URLs that engines may fetch, each HOST or HOST:PORT (default: none; images come as data: URLs)",
        "HOST,...",
        type=_hosts,
    )
    engine_xargs: frozenset[str] = _api(
        frozenset(),
        "further names in vllm_xargs that go to the engine, for custom logits processors (default: none)",
        "NAME,...",
    )
    cors_origin: tuple[str, ...] = _api((), "origins whose pages may call the API, or * (default: none)", "ORIGIN,...")
    trusted_proxies: tuple[str, ...] = _net(
        (),
        "networks of fronts whose Forwarded and X-Forwarded-For name the client's address (default: none)",
        "CIDR,...",
    )
    api_keys: str | None = _api(None, "API keys, see `headstart keys` (default: no key is asked for)", "FILE")
    tenant_header: str = _api(
        TENANT_HEADER,
        "header in which a front with a key marked `trusted_front` names the tenant (default x-headstart-tenant)",
        "NAME",
    )
    limits_gateways: int = _api(
        1, "gateways that share the limits of keys; without Redis each has its part (default 1)", least=1
    )
    aliases: Mapping[str, str] | None = _api(
        None, "a further name of a model", "NAME=MODEL", flag="--alias", action="append", type=model_alias
    )
    tool_parser: str | None = _api(
        None, "format of the models' tool calls (default: by template and tokens)", choices=tuple(FORMATS)
    )
    reasoning: str | None = _api(
        None,
        "format of the models' reasoning; none: it is part of the answer (default: by template and tokens)",
        choices=(NO_REASONING, *THOUGHT_FORMATS),
    )
    reasoning_field_name: str | None = _api(
        None, "the one field of a chat's answer that has its reasoning (default: both)", choices=THOUGHT_FIELDS
    )
    chat_template: Mapping[str, str] | None = _api(
        None,
        "a chat template instead of those of the models, or of one (default: none)",
        "[MODEL=]FILE",
        action="append",
        type=_model_template,
    )
    default_chat_template_kwargs: Mapping[str, Any] | None = _api(
        None,
        "switches of the chat templates of all models, or of one, which requests may change (default: none)",
        "[MODEL=]JSON",
        action="append",
        type=_model_kwargs,
    )
    force_chat_template_kwargs: Mapping[str, Any] | None = _api(
        None,
        "switches of the chat templates of all models, or of one, which no request changes (default: none)",
        "[MODEL=]JSON",
        action="append",
        type=_model_kwargs,
    )
    strict_template: bool = _api(
        False, "refuse messages that a model's template does not take (default: change them in place)"
    )
    sort_tool_schemas: bool = _api(
        False, "write the keys of tools' schemas in one order, for clients whose order changes (default: as sent)"
    )
    strict_tools: bool = _api(
        False, "refuse tools that only a vendor's server can run (default: leave them out where the model is free)"
    )
    strict_blocks: bool = _api(
        False, "refuse images and other parts that a model of text cannot read (default: a line in their place)"
    )
    control_tokens_in_content: bool = _api(
        False, "read control tokens in messages as such: clients can then forge turns (default: as text)"
    )
    clamp_max_tokens: bool = _api(
        False, "cut the max_tokens of chats and completions to what the context has room for (default: a 400)"
    )
    keep_client_lines: bool = _api(
        False, "keep lines that agents put into prompts for other servers (default: known ones are removed)"
    )
    usage_log: str | None = _watch(
        None, "a line of JSON for each request: tokens and seconds by tenant and key, no text (default: none)", "FILE"
    )
    usage_log_size_bytes: int = _watch(
        64 << 20, "size at which the usage log is renamed (default 64M)", "SIZE", type=num_bytes
    )
    usage_log_files: int = _watch(64, "renamed usage logs that are kept (default 64)", least=1)
    access_log: bool = _watch(False, "log a line for each answer: status, seconds, tokens")
    grafana_url: str = _watch("", "the Grafana board that the dashboard links to (default: none)", "URL")

    def __post_init__(self) -> None:
        SharedConfig.__post_init__(self)
        WorkerNetworks(self.worker_networks)
        for flag, values, pattern, takes in (
            ("--ops-hosts", self.ops_hosts, _HOST_NAME, "names without scheme and port"),
            ("--image-hosts", self.image_hosts, _IMAGE_HOST, "HOST or HOST:PORT"),
            ("--engine-xargs", sorted(self.engine_xargs), _XARG, "names but those of transfers (kv_*, ec_*)"),
            ("--tenant-header", [self.tenant_header], _HEADER, "the name of a header that begins with x-"),
            ("--cors-origin", self.cors_origin, _ORIGIN, "https://NAME[:PORT] or *"),
            ("--grafana-url", filter(None, [self.grafana_url]), _WEB_PAGE, "https://NAME/PATH"),
        ):
            for value in values:
                if pattern.fullmatch(value) is None:
                    raise ValueError(f"{flag} takes {takes}, got {value!r}")
        for network in self.trusted_proxies:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                raise ValueError(f"--trusted-proxies takes networks such as 10.0.0.0/8: {error}") from None
        if self.worker_ca is not None and (plain := [url for url in self.workers if url.startswith("http:")]):
            raise ValueError(f"--workers {plain[0]}: --worker-ca asks for TLS, so give https://HOST:PORT")
        for source in (self.chat_template or {}).values():
            try:
                TemplateEnvironment().parse(source)
            except TemplateError as error:
                raise ValueError(f"--chat-template: {error}") from error
        if self.redis is None and not self.workers:
            raise ValueError("give --redis URL, --workers URL, or both: else no worker can be found")

    def template_of(self, model: str) -> str | None:
        """Return the operator's template of a model; None: its own."""
        given = self.chat_template or {}
        return given.get(model, given.get(""))

    def template_kwargs_of(self, model: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the operator's switches of a model's template: those that a request may change, and the others."""
        default, forced = self.default_chat_template_kwargs or {}, self.force_chat_template_kwargs or {}
        return {**default.get("", {}), **default.get(model, {})}, {**forced.get("", {}), **forced.get(model, {})}

    def ops_key(self) -> bytes | None:
        """Read --ops-key-file. Raises ValueError."""
        return None if self.ops_key_file is None else read_secret("--ops-key-file", self.ops_key_file)


def parser() -> CommandParser:
    return make_parser(
        GatewayConfig,
        ("network", "workers", "shared index", "API", "observability"),
        "gateway",
        "The OpenAI API in front of the workers. Holds no model files: workers serve their tokenizers.",
    )


CONVERTED: Final[Mapping[str, Any]] = {
    **{each.name: type(each.default) for each in fields(GatewayConfig) if isinstance(each.default, tuple | frozenset)},
    **dict.fromkeys(("aliases", "chat_template", "default_chat_template_kwargs", "force_chat_template_kwargs"), dict),
}
"""The types of values that are given more than once."""


def parse(argv: Sequence[str]) -> GatewayConfig:
    """Parse a command line. Exits as argparse does on an unknown option; raises ValueError on a bad value."""
    args = vars(parser().parse_args(argv))
    for name, convert in CONVERTED.items():
        if name in args:
            args[name] = convert(args[name])
    return GatewayConfig(**args)
