"""The OpenAI-compatible door: HTTP in, `GenerationService` out."""
