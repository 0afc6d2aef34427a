"""/v1/responses, stateless: nothing is stored, so a request carries its whole conversation.

types      the body, and its way to a chat request      items   output items and their events
presenter  the response object and its stream
"""
