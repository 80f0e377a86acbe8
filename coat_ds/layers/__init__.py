"""FP8 linear layers and 8-bit saved activations for the modules of any model.

This package may import `coat_kernels` and the config; importing it imports no framework. Start at convert.py.

    convert.py       `convert`, `unconvert`: which module gets which forward
    detection/       which modules can be converted, found by what they compute
    modules/         the forwards of linear layers, norms, feed-forwards, attention, experts, decoder layers
    fused_layer.py   the fused decoder layer of every framework, which the adapters call
    parallel/        weights that are split over ranks
    conversion.py    what was converted and what was not; inventory.py counts the layers of any model

Classes, parameters and buffers of the model are unchanged.
"""
