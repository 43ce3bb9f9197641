"""Two ranks that save and save, until somebody kills them: python -m tests.checkpoints.saving_for_ever FOLDER
[async]"""

import itertools
import sys

from minitorch_dist import comm, nn, optim
from minitorch_dist.checkpoints import Checkpoints
from minitorch_dist.parallel import DistributedDataParallel

if __name__ == "__main__":
    world = comm.world()
    model = DistributedDataParallel(nn.Linear(30, 20), world)
    optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9)
    checkpoints = Checkpoints(sys.argv[1], world, async_op="async" in sys.argv)
    for step in itertools.count(1):
        for p in model.parameters():
            p.data[...] = step
        checkpoints.save(step, model, optimizer)
