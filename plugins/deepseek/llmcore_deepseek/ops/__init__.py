"""The ops of latent attention: the attention over latent rows, and what the layer computes beside it."""
