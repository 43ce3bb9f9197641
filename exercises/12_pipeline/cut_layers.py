"""12.3 Stages of equal weight.

A pipeline is as fast as its slowest stage: all others wait for it, in every micro-batch. So the layers are cut where
the most costly stage costs least.
"""

from functools import cache


def cut_layers(costs, stages):
    """The layers cut into stages: a list of lists of layer numbers.

    costs   what each layer costs (seconds, or parameters), in the order of the model
    stages  how many stages, at most as many as layers

    Every layer is in one stage, in the model's order, and no stage is empty. No other such cut has a cheaper most
    costly stage. Fast enough for 40 layers in 8 stages, of which there are 15 million cuts.
    """
    raise NotImplementedError("begin with one stage; then two: where may the last stage begin, and what does each "
                              "choice cost?")
