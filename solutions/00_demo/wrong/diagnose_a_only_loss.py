# 00.2: A isn't “only the loss”
def diagnose():
    return {"A": "only the loss", "B": "mean of means", "C": "no broadcast"}
