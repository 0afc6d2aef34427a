"""Which worker gets a request.

router            index + fleet + scorer -> Placement     policies      the rules, and the cost in seconds
placement         one decision and its Placement          load_tracker  the load of each worker, estimated
types             RouteRequest, WorkerView                decisions     decisions, sampled for people
pending_prefixes  blocks that are being computed          prefix_tree   the tree of shared prefixes
"""
