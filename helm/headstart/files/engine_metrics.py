"""Relay an engine's metrics from the loopback address to Prometheus. Needs only the standard library.

HOST PORT URL: answers GET /metrics with the body of URL, and GET /health. Uses TLS if the workers do.
"""

import http.server
import os
import pathlib
import signal
import socket
import ssl
import sys
import urllib.request

CERTIFICATE = pathlib.Path("/etc/headstart/tls/tls.crt")
HOST, PORT, URL = sys.argv[1:]


class Relay(http.server.BaseHTTPRequestHandler):
    timeout = 10

    def do_GET(self) -> None:
        if self.path not in ("/metrics", "/health"):
            self.send_error(404)
            return
        body = b"" if self.path == "/health" else self.fetch()
        if body is None:
            self.send_error(502)
            return
        self.send_response(200)
        self.send_header("content-type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def fetch(self) -> "bytes | None":
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(URL, timeout=5) as answer:
                return answer.read()
        except OSError:
            return None

    def log_message(self, *args: object) -> None:
        """Write no line for each scrape."""


class Server(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET6 if ":" in HOST else socket.AF_INET

    def finish_request(self, request, client_address) -> None:
        """Shake hands in the request's own thread, with the current certificate: it may have been renewed."""
        if not CERTIFICATE.exists():
            super().finish_request(request, client_address)
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(CERTIFICATE, CERTIFICATE.with_suffix(".key"))
        request.settimeout(10)
        with context.wrap_socket(request, server_side=True) as encrypted:
            super().finish_request(encrypted, client_address)

    def handle_error(self, request, client_address) -> None:
        """Ignore peers that hang up or speak no TLS."""


signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # the first process of a container ignores it else
Server((HOST, int(PORT)), Relay).serve_forever()
