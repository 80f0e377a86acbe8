"""The Megatron adapter: layer specs, and what a Megatron model needs to run under DeepSpeed or on a CPU."""
