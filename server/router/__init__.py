"""Which worker gets a request.

router            index + fleet + scorer -> Placement     policies        the rules that choose
cost              every term of the cost, in seconds      load_tracker    the load of each worker, estimated
placement         one decision and its Placement          queue           every wait at the gateway
types             RouteRequest, NoWorkerError             index_accuracy  predicted against found tokens
live_blocks       blocks of live requests                 ledger          blocks of recent requests
short_list        the workers of a large fleet to score   decisions       a sample for the dashboard
fetch_plan        what is fetched, from where             copies          more homes for hot chains
"""
