"""Ops as C expressions: the ops that can be a part of a kernel."""

# dtype -> what its elements are in C
TYPES = {"float32": "float", "float64": "double", "bool": "unsigned char", "int32": "int", "int64": "long long"}

REDUCTIONS = {"sum", "max", "min"}

# {f} is f for float and nothing for double. Comparisons with NaN are false, so that max, min and relu hand NaN on.
ARITHMETIC = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "neg": "-{0}",
    "maximum": "({0} > {1} || {0} != {0}) ? {0} : {1}", "minimum": "({0} < {1} || {0} != {0}) ? {0} : {1}",
    "square": "{0} * {0}", "sqrt": "__builtin_sqrt{f}({0})", "rsqrt": "1 / __builtin_sqrt{f}({0})",
    "exp": "exp{f}({0})", "expm1": "expm1{f}({0})", "log": "log{f}({0})", "log1p": "log1p{f}({0})",
    "sin": "sin{f}({0})", "cos": "cos{f}({0})", "tanh": "tanh{f}({0})", "erf": "erf{f}({0})",
    "power": "pow{f}({0}, {1})", "abs": "__builtin_fabs{f}({0})", "floor": "__builtin_floor{f}({0})",
    "ceil": "__builtin_ceil{f}({0})", "sign": "{0} != {0} ? {0} : ({0} > 0) - ({0} < 0)",
    "relu": "({0} > 0 || {0} != {0}) ? {0} : 0", "where": "{0} ? {1} : {2}",
    "sigmoid": "({0} >= 0 ? 1 : {s}) / (1 + {s})",
    "mod": "{m} == 0 ? __builtin_copysign{f}(0, {1}) : ({m} < 0) != ({1} < 0) ? {m} + {1} : {m}"}
HELPERS = {"sigmoid": ("s", "exp{f}(-__builtin_fabs{f}({0}))"), "mod": ("m", "fmod{f}({0}, {1})")}
COMPARISONS = {"greater": "{0} > {1}", "greater_equal": "{0} >= {1}", "less": "{0} < {1}", "less_equal": "{0} <= {1}",
               "equal": "{0} == {1}", "not_equal": "{0} != {1}", "isnan": "{0} != {0}", "isfinite": "({0} - {0}) == 0"}
LOGIC = {"logical_and": "{0} && {1}", "logical_or": "{0} || {1}", "logical_not": "!{0}",
         "logical_xor": "({0} != 0) != ({1} != 0)"}


def expressible(node):
    """Whether C computes what an op does, for its dtypes."""
    kinds, out = {v.dtype.kind for v in node.inputs}, node.result.dtype
    if not all(v.dtype.name in TYPES and v.dtype.isnative for v in (*node.inputs, *node.results)):
        return False
    if node.name in REDUCTIONS:
        return out.kind == "f" and kinds == {"f"}
    if node.name == "power":
        return out.kind == "f"
    if node.name in ("mod", "floor", "ceil", "sign", "abs"):
        return kinds == {"f"}
    if node.name == "isfinite" and kinds != {"f"}:
        return False
    whole = kinds <= {"i", "b"} or node.name == "where" and out.kind == "i"
    if whole and any(type(a) is int and abs(a) >= 2 ** 31 for a in node.args):      # NumPy knows better
        return False
    if node.name in ARITHMETIC:
        return out.kind in "fi" or node.name in ("where", "maximum", "minimum")
    return (node.name in COMPARISONS or node.name in LOGIC
            or node.name in ("reshape", "broadcast_to")
            or node.name == "astype" and not (kinds == {"f"} and out.kind == "i"))
