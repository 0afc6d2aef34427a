"""What people see of a gateway: two pages on the ops port, and the live feed behind the dashboard and `headstart top`.

feed        one producer for all viewers; nothing runs while nobody looks
decisions   the routing decisions, sampled            workers    a row for every worker
traffic     rates and quantiles from the counters     prefix_tree   the tree of shared prefixes
pages       the files of `server/pages/`              events     the feed on one connection
"""
