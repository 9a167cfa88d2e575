"""How many target groups and draft workers there should be: decided by pure functions, carried out by Ray
Serve."""
