# 00.2: A isn't “no broadcast”
def diagnose():
    return {"A": "no broadcast", "B": "mean of means", "C": "stale gradients"}
