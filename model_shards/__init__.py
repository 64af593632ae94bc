"""What a model is and how it is cut: specs, partitions, layers, families and weights.

Knows tensors and ranks; knows nothing of sequences, schedules, HTTP or Ray.
"""
