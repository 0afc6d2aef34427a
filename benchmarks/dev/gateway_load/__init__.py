"""The other end of the gateway's bench, lean enough to share one core: worker stub, bare proxy, load client.

stub    a worker that answers at once, in msgpack and in OpenAI's shapes     proxy   Starlette passing bytes on
client  keep-alive connections that count what comes back                   traffic what is asked
"""
