"""`headstart gateway --processes N`: many processes on one port, one ops port for the whole.

    parent --+-- a gateway of its own behind the ops port: workers, explain, dashboard, chat page
             +-- process 0..N-1   each a gateway on a socket of the one public port (SO_REUSEPORT)
                                  and on a unix socket, from which the parent sums metrics and takes decisions

The parent holds all sockets: what comes in while a process is being replaced waits for the next one.
"""
