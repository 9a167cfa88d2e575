"""A draft model that goes on learning from what the target writes (``speculative_config.online``)."""
