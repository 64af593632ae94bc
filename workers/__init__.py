"""The data plane: one rank's memory and its step.

Knows plans, KV blocks, kernels and collectives; knows nothing of text, HTTP or scheduling policy.
Ray appears only in `workers.actor`.
"""
