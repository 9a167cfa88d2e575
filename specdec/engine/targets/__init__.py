"""The target model: its contract, where it runs, who drafts inside it, and its two ends of a channel."""
