"""The control plane: HTTP, text, scheduling, placement and supervision.

Knows requests and ranks as processes; leaves tensors to `workers` and `model_shards`.
"""
