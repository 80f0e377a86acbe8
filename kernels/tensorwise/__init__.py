"""FP8 with one scale per tensor, as FP8 GEMMs expect it.

The amax of a tensor is its largest finite magnitude; its maxima are the amaxes of its parts. scale.py finds
the maxima and the scale, quantize.py writes codes, transpose.py transposes them, predicted.py quantizes
before the scale is known, and together.py quantizes several tensors in one launch.
"""

from coat_kernels.tensorwise.predicted import Attempt, PredictedScale, write_reference
from coat_kernels.tensorwise.quantize import (
    Quantized,
    launch_quantize,
    quantize_codes,
    quantize_tensor,
    quantize_tensor_reference,
    quantize_tensor_triton,
)
from coat_kernels.tensorwise.scale import (
    NO_SCALES,
    Scales,
    largest_magnitude,
    largest_of,
    largest_of_maxima,
    largest_triton,
    maxima_reference,
    maxima_triton,
    row_maxima,
    tensor_scale_reference,
)
from coat_kernels.tensorwise.together import columns_together, rows_together
from coat_kernels.tensorwise.transpose import (
    empty_columns,
    transpose_codes,
    transpose_codes_reference,
    transpose_codes_triton,
)

__all__ = [
    "Attempt",
    "NO_SCALES",
    "PredictedScale",
    "Quantized",
    "Scales",
    "columns_together",
    "empty_columns",
    "largest_magnitude",
    "largest_of",
    "largest_of_maxima",
    "largest_triton",
    "launch_quantize",
    "maxima_reference",
    "maxima_triton",
    "quantize_codes",
    "quantize_tensor",
    "quantize_tensor_reference",
    "quantize_tensor_triton",
    "row_maxima",
    "rows_together",
    "tensor_scale_reference",
    "transpose_codes",
    "transpose_codes_reference",
    "transpose_codes_triton",
    "write_reference",
]
