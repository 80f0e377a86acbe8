"""FP8 with one scale per tensor, as FP8 GEMMs expect it.

It may import `autograd` and the files of `coat_kernels`. Start at operands.py.

The amax of a tensor is its largest finite magnitude; its maxima are the amaxes of its parts. scale.py finds
the maxima and the scale, quantize.py writes codes, transpose.py transposes them, predicted.py quantizes
before the scale is known, together.py quantizes several tensors in one launch, and operands.py chooses among
them for the operands of a GEMM.
"""

from coat_kernels.tensorwise.predicted import PredictedScale
from coat_kernels.tensorwise.quantize import quantize_tensor
from coat_kernels.tensorwise.scale import tensor_amax

__all__ = ["PredictedScale", "quantize_tensor", "tensor_amax"]
