"""The model, the step loop, the device's tables, sampling, and the processes around them."""
