"""A port of the gateway: sockets, TLS, reading HTTP strictly, writing server-sent events."""
