"""Take an engine that no other adapter of this pod has, and become its adapter. Needs only the standard library.

POD PODS RANKS TARGET ... -- COMMAND ...: a target is a URL, or dns:NAME:PORT for each address of a name. Each engine
belongs to one of the PODS, by its place in the list or by its address. It needs an adapter for each of its RANKS.
A claim is the name of a socket: it belongs to the pod's network, and ends with this process, which COMMAND replaces.
Until there is an engine that listens, the adapter's port answers probes and scrapes.
"""

import hashlib
import http.server
import os
import pathlib
import signal
import socket
import ssl
import sys
import threading
import time
import urllib.parse

CERTIFICATE = pathlib.Path("/etc/headstart/tls/tls.crt")
SEPARATOR = sys.argv.index("--")
POD, PODS, RANKS, *TARGETS = sys.argv[1:SEPARATOR]
COMMAND = sys.argv[SEPARATOR + 1 :]
OPTIONS = dict(word.partition("=")[::2] for word in COMMAND if word.startswith("--"))
PERIOD_S = 2


def engines(number: int, pods: int) -> "list[str]":
    """Return the URLs of the engines that belong to the pod of this number."""
    urls = [target for target in TARGETS if not target.startswith("dns:")]
    mine = urls[number::pods]
    for target in set(TARGETS).difference(urls):
        name, _, port = target[len("dns:") :].rpartition(":")
        try:
            found = {str(each[4][0]) for each in socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)}
        except OSError:  # no pod is ready
            continue
        for address in sorted(found):
            if int(hashlib.sha256(address.encode()).hexdigest(), 16) % pods == number:
                mine.append(f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}")
    return mine


def listens(url: str) -> bool:
    parts = urllib.parse.urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=2).close()
    except OSError:
        return False
    return True


def claim(url: str, rank: int) -> "socket.socket | None":
    place = socket.socket(socket.AF_UNIX)
    try:
        place.bind(f"\0headstart-engine {url} {rank}")
    except OSError:
        place.close()
        return None
    place.set_inheritable(True)
    return place


class Idle(http.server.BaseHTTPRequestHandler):
    """Answers the kubelet and Prometheus. Gateways find no worker here."""

    timeout = 10

    def do_GET(self) -> None:
        body = b"headstart_worker_engine_problem 1\n" if self.path == "/metrics" else b""
        self.send_response(200 if body or self.path.startswith("/health/") else 503)
        self.send_header("content-type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Write no line for each probe."""


class Server(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET6 if ":" in OPTIONS["--host"] else socket.AF_INET

    def finish_request(self, request, client_address) -> None:
        if CERTIFICATE.exists():
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(CERTIFICATE, CERTIFICATE.with_suffix(".key"))
            request.settimeout(10)
            request = context.wrap_socket(request, server_side=True)
        super().finish_request(request, client_address)
        if isinstance(request, ssl.SSLSocket):
            request.close()

    def handle_error(self, request, client_address) -> None:
        """Ignore peers that hang up or speak no TLS."""


def become(url: str, rank: int) -> None:
    print(f"this worker takes the engine {url}, rank {rank}", file=sys.stderr, flush=True)
    more = [f"--engine-url={url}", *([f"--engine-rank={rank}"] if int(RANKS) > 1 else [])]
    os.execvp(COMMAND[0], [*COMMAND, *more])


signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # the first process of a container ignores it else
server = Server((OPTIONS["--host"], int(OPTIONS["--port"])), Idle)
threading.Thread(target=server.serve_forever, daemon=True).start()
print("waiting for an engine that no other worker of this pod has:", *TARGETS, file=sys.stderr, flush=True)
while True:
    for url in engines(int(POD.rpartition("-")[2]), max(1, int(PODS))):
        if listens(url):
            for rank in range(int(RANKS)):
                if (place := claim(url, rank)) is not None:  # it is open until COMMAND ends
                    become(url, rank)
    time.sleep(PERIOD_S)
