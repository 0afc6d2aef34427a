"""Blocks on their way between the pool and other places. Everything here may fail: then blocks are computed.

pool --saver--> host memory, disk          pool --POST /blocks--> peers
pool <--fetches-- host memory, disk, peers

transfers    all of it, as the engine has it     pool_blocks   reads and writes blocks of the pool while steps run
fetches      what comes, and until when          saver         a thread that copies blocks to a store below the pool
peers        a client that fetches blocks of other workers
"""
