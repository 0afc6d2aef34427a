"""The ops port of a gateway: routes for operators, dashboard and chat page, and the live feed of `headstart top`.

app          routes of the ops port, and the pages     overview        gateway, workers and index as JSON and gauges
feed         traffic and decisions, one producer       prefix_tree     prefixes that requests share most
workers_needed  a number to scale each model by
"""
