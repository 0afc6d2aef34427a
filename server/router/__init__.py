"""Which worker gets a request.

router            index + fleet + scorer -> Placement     policies        the rules that choose
cost              every term of the cost, in seconds      load_tracker    the load of each worker, estimated
placement         one decision and its Placement          held_requests   the queue at the gateway
types             RouteRequest, NoWorkerError             index_accuracy  predicted against found tokens
pending_prefixes  blocks that are being computed          decisions       a sample for the dashboard
prefix_tree       the tree of shared prefixes             copies          more homes for hot chains
"""
