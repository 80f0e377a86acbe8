"""Prints how threads hold the rows that the norms' kernels sum, one line a sum, as JSON: [kernel, layout].

The kernels are compiled for a Hopper GPU, which need not be there, but not in a process with triton's
interpreter, whose kernels are not compiled.
"""

import json
import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from coat_kernels.norm import kernels

H, G = 128, 16
INPUTS = {"p_x": "*bf16", "p_weight": "*bf16", "eps": "fp32"}
KEPT = {"p_codes": "*u8", "p_exponent": "*u8", "p_rstd": "*fp32", "p_maxima": "*fp32"}
CODES = {"p_rows": "*u8", "p_predicted": "*fp32", "p_used": "*fp32"}
# what `launch_forward` asks for: y; its codes with a predicted scale; those with the right one
KERNELS = {"y": {"p_y": "*bf16"} | KEPT, "codes": CODES | KEPT, "codes again": CODES}


def compiled(present: dict[str, str], layer_norm: bool) -> str:
    """The kernel with these arguments, as text (TTGIR); others are None."""
    kernel = kernels.norm_forward_kernel.function
    tile = dict(kernels._tile(H, G, kernels.FORWARD_TILE, kernels.FORWARD_ELEMENTS))
    warps, types = tile.pop("num_warps"), INPUTS | present
    constants = {name: None for name in kernel.arg_names if name.startswith("p_") and name not in types}
    constants |= {
        "LAYER_NORM": layer_norm,
        "ZERO_CENTERED": False,
        "E5M2": False,
        "ROOTS": True,
        "EVEN": True,
    }
    constants |= tile
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
    # as launched: addresses and sizes are multiples of 16
    sizes = "rows", "h", "groups", "tiles"
    aligned = [i for i, (n, kind) in enumerate(signature.items()) if kind.startswith("*") or n in sizes]
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    return triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": warps}).asm["ttgir"]


if __name__ == "__main__":
    for name, present in KERNELS.items():
        for layer_norm in (False, True):
            text = compiled(present, layer_norm)
            layouts = dict(re.findall(r"^(#\w+) = (#ttg\.blocked<.*>)$", text, re.MULTILINE))
            for summed in re.findall(rf"\(tensor<\d+x{H}xf32, (#\w+)>\) -> tensor<\d+xf32", text):
                print(json.dumps([name, layouts[summed]]))
