"""What operators see of a gateway: the ops port, its two pages, and the live feed behind the dashboard and `top`.

app           routes of the ops port              pages        the files of `server/pages/`, for one origin alone
feed          one producer for all viewers        overview     gateway, workers and index as JSON
decisions     routing decisions, sampled          prefix_tree  the tree of shared prefixes
"""
