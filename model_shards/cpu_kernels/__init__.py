"""What a CPU computes between its matrix products, in C, compiled on the machine that runs it."""
