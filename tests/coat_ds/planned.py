"""A small model that is planned."""

from coat_ds import plan
from coat_ds.plan import Layout, Sizes, all_systems

# elements of SMALL's matrices in a layer, of its embedding, and of all of its norms
MATRICES, TABLE, NORMS = 64 * (128 + 64 + 256 + 128), 512 * 64, 5 * 64
SMALL = Sizes(layers=2, hidden=64, ffn=128, heads=4, groups=2, head_dim=16, vocabulary=512)


def moments(system="BF16", model: Sizes = SMALL, **spread) -> dict[str, plan.Memory]:
    system = all_systems()[system] if isinstance(system, str) else system
    found = plan.predict(model, Layout(**{"sequence": 8} | spread), system)
    return {memory.moment: memory for memory in found.moments}
