"""`headstart top`: the dashboard's facts in a terminal, from the same live feed.

events     the feed of one gateway, read      view       what was heard, kept as it is needed
screen     the lines to show                  command    the command line, and the terminal
"""
