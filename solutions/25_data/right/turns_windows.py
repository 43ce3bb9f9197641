# 25.3: all turns as stretches of places, by a heap, as a NumPy array
import heapq

import numpy as np


def turns(weights):
    total = sum(weights)
    begins = sorted((j * total // weight, -(-(j + 1) * total // weight), i)
                    for i, weight in enumerate(weights) for j in range(weight))
    order, ready = np.empty(total, np.int64), []
    for place in range(total):
        while begins and begins[0][0] <= place:
            _, end, source = begins.pop(0)
            heapq.heappush(ready, (end, source))
        order[place] = heapq.heappop(ready)[1]
    return order
