"""What needs Triton, which torch brings along on CUDA only: imported there, and by name, never by default."""
