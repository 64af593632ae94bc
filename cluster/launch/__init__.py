"""Starting Ray and Serve for one machine, and ending them so that nothing is left.

Knows processes, ports, folders and Ray's ways; knows nothing of tokens, tensors or command lines.
"""
