"""Fronts with the configuration that docs/behind-a-front.md gives, each a process of its own before two gateways."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.e2e.serving import free_ports
from tests.faults.fronts import FrontProcess, program

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "behind-a-front.md"
PROGRAMS: Final = ROOT / ".k8s" / "fronts"
NAMES: Final = ("nginx", "haproxy", "envoy", "caddy", "traefik", "apache")
_BLOCK: Final = re.compile(r"^```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)

_NGINX: Final = """
user root; daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log info; worker_processes 1;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  client_body_temp_path {folder}; proxy_temp_path {folder};
  fastcgi_temp_path {folder}; uwsgi_temp_path {folder}; scgi_temp_path {folder};
  {lines}
}}
"""
_APACHE_MODULES: Final = (
    *("mpm_event", "authz_core", "headers", "reqtimeout", "slotmem_shm"),
    *("proxy", "proxy_http", "proxy_balancer", "proxy_hcheck", "lbmethod_byrequests"),
)
_APACHE: Final = """
ServerName localhost
DefaultRuntimeDir {folder}
PidFile {folder}/apache.pid
ErrorLog {folder}/error.log
{modules}
{lines}
"""


def documented(name: str) -> list[str]:
    """Return the blocks of configuration in the front's section of the page."""
    sections = PAGE.read_text().split("\n## ")
    [section] = [section for section in sections if section.lower().startswith(f"{name}\n")]
    return _BLOCK.findall(section)


def _nginx(folder: Path, blocks: Sequence[str]) -> list[str]:
    config = folder / "nginx.conf"
    config.write_text(_NGINX.format(folder=folder, lines=blocks[0]))
    return [program("nginx", PROGRAMS), "-p", str(folder), "-c", str(config)]


def _haproxy(folder: Path, blocks: Sequence[str]) -> list[str]:
    config = folder / "haproxy.cfg"
    config.write_text(blocks[0])
    return [program("haproxy", PROGRAMS), "-f", str(config)]


def _envoy(folder: Path, blocks: Sequence[str]) -> list[str]:
    config = folder / "envoy.yaml"
    config.write_text(blocks[0])
    return [
        program("envoy", PROGRAMS),
        "-c",
        str(config),
        "--concurrency",
        "1",
        "--disable-hot-restart",
        "-l",
        "warning",
    ]


def _caddy(folder: Path, blocks: Sequence[str]) -> list[str]:
    config = folder / "Caddyfile"
    config.write_text(f"{{\n\tadmin off\n\tauto_https off\n}}\n{blocks[0]}")
    return [program("caddy", PROGRAMS), "run", "--config", str(config), "--adapter", "caddyfile"]


def _traefik(folder: Path, blocks: Sequence[str]) -> list[str]:
    static, dynamic = folder / "traefik.yaml", folder / "dynamic.yaml"
    static.write_text(f"{blocks[0]}providers: {{file: {{filename: {dynamic}}}}}\n")
    dynamic.write_text(blocks[1])
    return [program("traefik", PROGRAMS), f"--configFile={static}"]


def _apache(folder: Path, blocks: Sequence[str]) -> list[str]:
    config = folder / "apache.conf"
    modules = "\n".join(f"LoadModule {name}_module /usr/lib/apache2/modules/mod_{name}.so" for name in _APACHE_MODULES)
    config.write_text(_APACHE.format(folder=folder, modules=modules, lines=blocks[0]))
    return [program("apache2", PROGRAMS), "-f", str(config), "-D", "FOREGROUND"]


_COMMANDS: Final[dict[str, Callable[[Path, Sequence[str]], list[str]]]] = {
    **{"nginx": _nginx, "haproxy": _haproxy, "envoy": _envoy, "caddy": _caddy, "traefik": _traefik, "apache": _apache}
}


class DocumentedFront(FrontProcess):
    """A running front of the page."""

    def __init__(
        self, name: str, folder: Path, gateways: Sequence[int], changes: Mapping[str, str] | None = None
    ) -> None:
        """`gateways`: their two ports. `changes`: texts of the page, and what replaces them."""
        (own_port,) = free_ports(1)
        folder.mkdir(parents=True, exist_ok=True)
        blocks = documented(name)
        for old, new in (changes or {}).items():
            assert any(old in block for block in blocks), f"the page has no {old}"
            blocks = [block.replace(old, new) for block in blocks]
        for number, port in enumerate(gateways):
            blocks = [
                re.sub(rf"(//| )gateway-{number}(:|, port_value: )8000", rf"\g<1>127.0.0.1\g<2>{port}", block)
                for block in blocks
            ]
        command = _COMMANDS[name](folder, [block.replace("8080", str(own_port)) for block in blocks])
        super().__init__(own_port, command, folder / "front.log")
