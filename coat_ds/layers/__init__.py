"""FP8 linear layers and 8-bit saved activations for the modules of any model.

This package may import `coat_kernels` and the config; importing it imports no framework. Start at convert.py.
`detection` finds the modules that can be converted, `modules` has their forwards, `parallel` those of weights
that are split over ranks. fused_layer.py is the decoder layer of every framework.

Classes, parameters and buffers of the model are unchanged.
"""
