"""Which worker gets a request.

placement   the contract with the HTTP side            cost      the design's cost, pure
load_tracker what is queued where, request by request   pending_prefixes blocks on their way into a worker's cache
recent      where prompts went lately, for when the    policies  headstart, and the rules of other gateways
            index is away                              scoring  one decision, without I/O: also the simulator's
router      HeadstartRouter: index + fleet + dispatch
"""
