"""How a token is chosen from a row of logits: noise, transforms, sampler."""
