"""A fake vLLM: its HTTP API, its cache events and a paged pool with prefix hits, over a model that only hashes.

The next token is a function of the last tokens. So two engines, or one after a restart, continue equally.

python -m tests.fake_engine FOLDER --port 8000 --events tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558 ...
"""
