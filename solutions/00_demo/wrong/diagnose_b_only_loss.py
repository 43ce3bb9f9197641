# 00.2: B isn't “only the loss”
def diagnose():
    return {"A": "stale gradients", "B": "only the loss", "C": "no broadcast"}
