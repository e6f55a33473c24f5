"""The ops of quantized linears. Each module is the reference of one op, in torch."""
