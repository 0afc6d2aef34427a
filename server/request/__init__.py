"""One request from its checked prompts to its last token, on however many workers.

request    a prompt's attempts: place, send, resume      retry        which failures are tried again, and the last error
choice     one of n answers: tokens in, text out         services     what all share: retry budget, poison requests
response   the answers to all prompts of a request       hints        a request's headers for the router
engine_answer                                            where an engine writes the text
"""
