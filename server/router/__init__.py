"""Which worker gets a request.

router            index + fleet + scorer -> Placement     policies        the rules: headstart and simpler ones
placement         one decision and its Placement          cost            the cost in seconds, pure
types             RouteRequest, WorkerView                load_tracker    the load of each worker, estimated
pending_prefixes  blocks that are being computed          index_accuracy  precision and recall of the index
"""
