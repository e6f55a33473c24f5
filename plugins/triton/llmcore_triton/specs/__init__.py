"""The specs of the kernels, without torch and triton: one module per kind of op."""
