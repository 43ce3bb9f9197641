# 00.2: C isn't “own order”
def diagnose():
    return {"A": "stale gradients", "B": "mean of means", "C": "own order"}
