"""Load on any OpenAI-compatible server, and what it says about latency and throughput.

Knows HTTP streams and clocks; knows nothing of our engine, Ray or torch, so that it measures peers alike.
"""
