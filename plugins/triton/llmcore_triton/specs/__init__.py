"""What each kernel is for, without torch and triton: one module per kind of op."""
