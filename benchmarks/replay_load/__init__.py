"""Recorded conversations played against a running server: the parts of `headstart bench replay`."""
