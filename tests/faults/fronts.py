"""Proxies before a gateway, set up as their ingress controllers set them up, each a process of its own."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from tests.e2e.serving import free_ports, is_free
from tests.waiting import wait_until

# As ingress-nginx writes it: Upgrade is passed on, and connections to the gateway are kept and shared.
NGINX: Final = """
daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log info; worker_processes 1;
events {{ worker_connections 256; }}
http {{
  access_log off; client_max_body_size 1m;
  client_body_temp_path {folder}; proxy_temp_path {folder};
  fastcgi_temp_path {folder}; uwsgi_temp_path {folder}; scgi_temp_path {folder};
  map $http_upgrade $connection_upgrade {{ default upgrade; '' ''; }}
  upstream gateway {{ server 127.0.0.1:{port}; keepalive 4; keepalive_requests 10000; keepalive_timeout 60s; }}
  server {{
    listen 127.0.0.1:{front};
    location / {{
      proxy_pass http://gateway;
      proxy_http_version 1.1;
      proxy_set_header Host $http_host;
      proxy_set_header Upgrade $http_upgrade;
      proxy_set_header Connection $connection_upgrade;
      proxy_set_header X-Forwarded-For $remote_addr;
      proxy_set_header Proxy "";
      proxy_buffering off; proxy_request_buffering {buffering};
      proxy_read_timeout 300; proxy_next_upstream error timeout;
    }}
  }}
}}
"""

# As haproxy-ingress writes it.
HAPROXY: Final = """
defaults
  mode http
  option {connections}
  option redispatch
  option forwardfor
  http-reuse {reuse}
  timeout connect 60s
  timeout client 300s
  timeout server 300s
  timeout http-request 60s
frontend http
  bind 127.0.0.1:{front}
  default_backend gateway
backend gateway
  server one 127.0.0.1:{port} pool-max-conn 4
"""

FRONTS: Final[dict[str, tuple[str, dict[str, str]]]] = {
    "nginx": (NGINX, {"buffering": "on"}),
    "nginx that passes bodies on as they come": (NGINX, {"buffering": "off"}),
    "haproxy": (HAPROXY, {"connections": "http-keep-alive", "reuse": "always"}),
    "haproxy that closes": (HAPROXY, {"connections": "http-server-close", "reuse": "safe"}),
}


def program(name: str, *folders: Path) -> str:
    """Return the path of a front's program, in the system's folders or these."""
    path = shutil.which(name, path=":".join(("/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin", *map(str, folders))))
    assert path is not None, f"{name} is missing: python tools/install_k8s_tools.py --clients"
    return path


class FrontProcess:
    """A running front. Use as a context manager."""

    def __init__(self, port: int, command: Sequence[str], log: Path) -> None:
        self.port = port
        self._command = command
        self.log = log

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        try:
            wait_until(lambda: self._process.poll() is not None or not is_free(self.port))
            assert self._process.poll() is None, self.log.read_text()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()


class Front(FrontProcess):
    """A running proxy of `FRONTS`."""

    def __init__(self, name: str, folder: Path, port: int) -> None:
        """`port`: the gateway's."""
        template, options = FRONTS[name]
        kind, config, (own_port,) = name.partition(" ")[0], folder / "front.conf", free_ports(1)
        config.write_text(template.format(folder=folder, port=port, front=own_port, **options))
        options_of = {"nginx": ["-p", str(folder), "-c", str(config)], "haproxy": ["-f", str(config)]}
        super().__init__(own_port, [program(kind), *options_of[kind]], folder / "front.log")
