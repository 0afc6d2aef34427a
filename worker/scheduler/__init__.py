"""Continuous batching: who computes which tokens in the next step. No torch, no asyncio, no clock of its own.

submit -> waiting --admit--> running --update--> finished
             ^                  |
             +----- preempt ----+        abort and fail: from anywhere
"""
