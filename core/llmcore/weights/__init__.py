"""Loading of weights: from the tensors of a checkpoint to the parameters of a model."""
