"""Which worker gets a request.

router            index + fleet + scorer -> Placement     policies        the rules that choose
cost              every term of the cost, in seconds      load_tracker    the load of each worker, estimated
placement         one decision and its Placement          queue           every wait at the gateway
types             RouteRequest, NoWorkerError             index_accuracy  predicted against found tokens
ledger            blocks of live and recent requests      decisions       a sample for the dashboard
short_list        the workers of a large fleet to score   copies          more homes for hot chains
fetch_plan        what is fetched, from where             workers_needed  a number to scale each model by
"""
