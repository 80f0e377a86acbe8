"""FP8 linear layers and 8-bit saved activations for the modules of any model.

It may import `coat_kernels` and the config, and no framework when it is imported. Start at convert.py.

    convert.py       `convert`, `unconvert`: which module gets which forward
    detection/       which modules can be converted, found by what they compute
    modules/         the forwards of linear layers, norms, feed-forwards, attention and experts
    fused_layer.py   the forward of a whole decoder layer, by the fused blocks of `coat_kernels.blocks`
    parallel/        weights that lie on several ranks
    conversion.py    what was converted and what stayed; inventory.py counts the layers of any model

Classes, parameters and buffers of the model stay as they are.
"""
