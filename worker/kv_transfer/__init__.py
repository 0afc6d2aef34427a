"""Moves blocks between the pool and other places. When a move fails, the blocks are computed.

pool --saver--> host memory, disk          pool --POST /blocks--> peers
pool <--fetches-- host memory, disk, peers

transfers    the engine's view of it all         pool_blocks   reads and writes blocks of the pool while steps run
fetches      blocks for waiting sequences        saver         a thread that copies blocks to a store below the pool
peers        a client of other workers      mover         chains of a worker that joins or leaves
"""
