"""Plumbing that gateway and worker share: options, logs, sockets, TLS, tracing. It imports nothing else of either."""
