"""The ops port of a gateway: routes for operators, dashboard and chat page, and the live feed of `headstart top`.

app        routes of the ops port                       pages        the files of `server/pages/`, for one origin alone
feed       one producer for all viewers                 overview     gateway, workers and index as JSON and as gauges
traffic    rates and quantiles of the last seconds
"""
