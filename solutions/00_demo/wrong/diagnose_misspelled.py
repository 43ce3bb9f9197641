# 00.2: spelled as there
def diagnose():
    return {"A": "stale gradients", "B": "mean of mean", "C": "no broadcast"}
