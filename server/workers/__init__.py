"""The workers as the gateway sees them.

fleet         which workers are known and live      networks      where workers may be, and who is believed
client        the worker's HTTP API, hung workers   connection    HTTP connections, and their errors
"""
