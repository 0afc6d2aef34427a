"""Parts of `headstart bench engines`: what an adapter costs, and routers head to head on the same engines."""
