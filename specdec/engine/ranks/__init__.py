"""The ranks that hold one model together: rank 0 leads, the others follow."""
