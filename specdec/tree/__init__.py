"""The shape of proposals: chains and trees."""
