"""Open-loop load on any OpenAI endpoint: when requests arrive does not depend on how the server does."""
