# 08.2: arrays of one shape have become one
import numpy as np


def broadcast_parameters(comm, parameters):
    sent = {}
    for p in parameters:
        if p.shape not in sent:
            comm.broadcast(p, src=0)
            sent[p.shape] = p
        else:
            p[...] = sent[p.shape]
