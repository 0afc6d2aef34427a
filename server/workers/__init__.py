"""The workers as the gateway sees them.

fleet         which workers are known and live      networks      where workers may be
client        the worker's HTTP API                 verification  whose registrations are believed
connection    the hot path's HTTP connections       watch         finds hung workers
"""
