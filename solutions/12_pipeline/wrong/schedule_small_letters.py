# 12.1: with a step called 'f'
def gpipe(stages, micro_batches):
    return [[(kind, k) for kind in "fb" for k in range(micro_batches)] for _ in range(stages)]


def one_forward_one_backward(stages, micro_batches):
    return gpipe(stages, micro_batches)
