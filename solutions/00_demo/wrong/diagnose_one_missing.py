# 00.2: return one mistake for each
def diagnose():
    return {"A": "stale gradients", "B": "mean of means"}
