# 00.2: C isn't “summed”
def diagnose():
    return {"A": "stale gradients", "B": "mean of means", "C": "summed"}
