"""Contracts between scheduler, transfers, adapter, HTTP side and engine thread. Imports none of them.

engine       an engine as the HTTP side sees it        exchange   blocks between workers: messages and an engine's side
step         a step, between scheduler and runner      mailbox    commands for the engine thread
metrics      the worker's metrics                      rates      the numbers that a worker smooths
"""
