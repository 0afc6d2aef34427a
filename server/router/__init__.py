"""Which worker gets a request.

placement   the contract with the HTTP side            cost      the design's cost, pure
books       what is queued where, request by request   overlay   blocks on their way into a worker's cache
recent      where prompts went lately, for when the    policies  headstart, and the rules of other gateways
            index is away                              dispatch  one decision, without I/O: also the simulator's
router      HeadstartRouter: index + fleet + dispatch
"""
