"""`headstart serve`: every part on one machine, supervised.

    supervisor --+-- redis-server   on a unix socket in a private folder
                 +-- worker 0..N-1  each its own process and port
                 +-- gateway        public port and ops port

The parts are the ones that run on Kubernetes; only their starting and restarting is different here.
"""
