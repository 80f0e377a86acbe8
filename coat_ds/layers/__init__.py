"""FP8 linear layers and 8-bit saved activations for modules that somebody else wrote.

    convert.py       which module becomes what; `coat_ds.convert`, `unconvert`, `conversion_of`
    conversion.py    what was converted and what stayed
    replaced.py      what stands in a module's own attribute `forward`
    probe.py         what a module computes, found by running it on a few numbers
    linear.py, norm.py, feed_forward.py, attention.py, experts.py    the forwards
    merged_linear.py layers that read the same input, as one product
    decoder_layer.py whole layers by the fused blocks

A module is known by what it computes, not by its class or name. Classes, parameters and buffers stay as they
are; importing this package imports no framework.
"""
