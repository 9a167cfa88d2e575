"""Lookahead decoding: the target makes up n-grams beside what it verifies (Fu et al., arXiv 2402.02057)."""
