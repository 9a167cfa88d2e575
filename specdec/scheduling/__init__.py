"""Who runs in the next round, with how many tokens: pure decisions over plain state, without torch."""
