"""`headstart doctor`: what this machine lacks for a gateway, a worker or both, and how to mend it.

check      one line of the answer          command    the command line
machine    Python, packages, limits        network    Redis and ports
worker     what `python -m worker.doctor` says of model, memory, device and kernel: it may import torch, this may not
"""
