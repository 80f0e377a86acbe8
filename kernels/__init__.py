"""FP8 quantization, layers and AdamW: every Triton kernel has a plain-PyTorch reference.

The package imports torch, Triton and NumPy, and none of the project's other packages. Start at norm/, the
smallest op that shows the pattern: reference.py specifies the op, kernels.py computes it on a GPU, op.py is
what layers call.

    norm, head_norm, activation, rope, linear, attention, experts    the ops of a layer
    blocks/            a dense layer as two fused blocks around attention
    tensorwise, groups FP8 with a scale per tensor, and 8 bits in groups: what the ops save and multiply
    adamw/, codecs/    the optimizer's step, and the formats of its moments
    autograd/          what autograd functions share
    graphs/            layers recorded and replayed as CUDA graphs
    weights, parallel  FP8 copies of weights, and messages of tensor parallelism
    fp8, tiles, fast_math, prepared, ops, device, libraries          formats, launches and devices
"""
