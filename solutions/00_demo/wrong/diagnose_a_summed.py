# 00.2: A isn't “summed”
def diagnose():
    return {"A": "summed", "B": "mean of means", "C": "no broadcast"}
