"""Which worker gets a request.

router            index + fleet + scorer -> Placement     policies        the rules: headstart and simpler ones
placement         one decision and its Placement          cost            the cost in seconds, pure
types             RouteRequest, WorkerView                load_tracker    the load of each worker, estimated
pending_prefixes  blocks that are being computed          index_accuracy  precision and recall of the index
decisions         decisions, sampled for people           prefix_tree     the tree of shared prefixes
"""
