"""What the answers of chapter 18 are tried with, and the mistakes that are known."""

import numpy as np

from exercises.frame import Check, demand, gives, when

from . import drawing, formats, masters, network, scaling
from .formats import mistaken, said
from .masters import adam
from .scaling import world

# ---------------------------------------------------------------- 18.1

POWERS = (0, 16)        # of the scales in the picture
FREXP = " (np.frexp's fraction begins at ½, not at 1)"
DIGITS = ((-1, "a bit too few: the leading 1 isn't stored, so M bits of mantissa are M + 1 digits" + FREXP),
          (1, "a bit too many: M counts the bits behind the leading 1" + FREXP))


def example(case, got):
    """The first number that is wrong, as a call; "" where it is the limits, or the shape, that are."""
    right, mine = formats.truth(case), np.asarray(got["result"])
    if mine.shape != case["x"].shape:
        return ""
    wrong = ~((mine == right["result"]) | np.isnan(mine) & np.isnan(right["result"]))
    wrong |= ~np.isnan(mine) & (np.signbit(mine) != right["signs"])
    if not wrong.any():
        return ""
    x, y, z = (a[wrong][0] for a in (case["x"], mine, right["result"]))
    return f" (E = {case['exponent_bits']}, M = {case['mantissa_bits']}: {x:.9g} becomes {y:.9g}, not {z:.9g})"


def rounds(sentence, hypothesis):
    """gives, with an example."""
    return gives(lambda case, got: sentence + example(case, got), hypothesis)


def largest_times(factor):
    return mistaken(top=lambda E, M, largest: factor(M) * largest)


class RoundTo(Check):
    exercise = "18.1"
    tolerance = 0.0
    signatures = [
        gives("epsilon is the distance from 1 to the next number, 2^-M; the largest error of rounding is half of it",
              said("epsilon", lambda E, M, of: of["epsilon"] / 2)),
        gives("below the smallest normal number there are subnormal ones: 0.00…01 · 2^(1 - bias)",
              said("smallest", lambda E, M, of: of["normal"])),
        gives("e = 0 has the exponent of e = 1, 1 - bias, and not one less: so subnormal numbers continue the normal "
              "ones without a gap", said("smallest", lambda E, M, of: of["smallest"] / 2)),
        rounds("zeros lose their signs: -0.0 stays -0.0, and what is rounded to 0 from below becomes -0.0, too",
               mistaken(after=lambda x, y, of: np.where(y == 0, 0.0, y))),
        rounds("rounded toward 0: the bits behind the last are cut off. Asked for is the nearest number",
               mistaken(rint=np.trunc)),
        rounds("rounded down; asked for is the nearest number", mistaken(rint=np.floor)),
        rounds("ties are rounded away from 0: adding half and cutting off moves sums of many numbers to one side. Of "
               "two equally near ones take that whose last bit is 0", mistaken(rint=formats.away)),
        rounds("ties are rounded up, floor(x + ½): of two equally near ones take that whose last bit is 0",
               mistaken(rint=formats.halves_up)),
        rounds("subnormal results are flushed to 0: with exponent bits 0 there is no leading 1, and numbers go on down "
               "in steps of the same size", mistaken(after=formats.flushed)),
        rounds("what is below the smallest normal number is flushed to 0: with exponent bits 0 there is no leading 1, "
               "and numbers go on down in steps of the same size", mistaken(after=formats.flushed_before)),
        rounds("what is below the smallest number becomes 0, but the upper half of it is nearer to that number",
               mistaken(after=formats.below_smallest)),
        rounds("there is no end below: under the smallest normal number the gap stays the same, and results keep fewer "
               "and fewer digits", mistaken(subnormals=False)),
        rounds("too large numbers stay at the largest one: that is saturation. Asked for is inf, by which one sees an "
               "overflow", mistaken(after=formats.saturated)),
        rounds("too large numbers, and inf itself, stay at the largest one: that is saturation. Asked for is inf",
               mistaken(after=formats.clipped)),
        rounds("there is no overflow: the format ends, and what is beyond the largest number becomes inf",
               mistaken(top=lambda E, M, largest: np.inf)),
        rounds("what is a little above the largest number becomes inf before it is rounded: nearer to the largest, it "
               "is rounded to it", mistaken(before=True)),
        rounds("inf lacks its sign: overflow is -inf on the other side",
               mistaken(after=lambda x, y, of: np.where(np.isinf(y), np.inf, y))),
        rounds("inf becomes NaN: an inf minus an inf, or over an inf",
               mistaken(after=lambda x, y, of: np.where(np.isinf(x), np.nan, y))),
        rounds("NaN is lost: every comparison with NaN is false",
               mistaken(after=lambda x, y, of: np.where(np.isnan(x), 0, y))),
        rounds("NaN is lost: every comparison with NaN is false",
               mistaken(after=lambda x, y, of: np.where(np.isnan(x), np.copysign(np.inf, x), y))),
        when("some NaN is a number now: where all bits of the mantissa are ones, what is added to them runs on into "
             "the exponent, and the sign", lambda case, got: formats.lost_nan(case, got)),
        rounds("the signs are gone", mistaken(after=lambda x, y, of: np.abs(y))),
        rounds("the exponent of all ones is taken for an ordinary one: it is inf's and NaN's, so the format ends a "
               "factor of 2 earlier", largest_times(lambda M: 2.0)),
        rounds("the largest number isn't 2^bias: its mantissa is all ones",
               largest_times(lambda M: 1 / (2 - 2.0 ** -M))),
        rounds("the bias is 2^(E-1) - 1, one less than that", mistaken(bias=lambda E: 2 ** (E - 1))),
        rounds("the bias is 2^(E-1) - 1, one more than that", mistaken(bias=lambda E: 2 ** (E - 1) - 2)),
        *[rounds(sentence, mistaken(digits=digits, paper=paper)) for digits, sentence in DIGITS
          for paper in (True, False)],
        rounds("that is float16 whatever the bits", formats.always_float16),
        rounds("the exponent is one too large just below powers of 2: a logarithm in float32 is a whole number there "
               "already. np.frexp reads the exponent's bits", mistaken(exponent=formats.logarithm)),
        when(lambda case, got: "these aren't the format's nearest numbers" + example(case, got), example),
    ]
    demands = [demand(lambda case, got: f"the values are right, in {got['dtype']}; float32 was asked for",
                      lambda case, got: got["dtype"] == "float32")]

    def cases(self, rng, ranks):
        grads = network.gradients()
        return [*formats.cases(rng), *({"x": grads * np.float32(2 ** power), "exponent_bits": 5, "mantissa_bits": 10}
                                       for power in POWERS)]

    def truth(self, case):
        return formats.truth(case)

    def picture(self, runs, path):
        found = runs[1][-len(POWERS):]
        return drawing.exponents({power: (case["x"], got["result"]) for power, (case, got)
                                  in zip(POWERS, found, strict=True)}, path)


# ---------------------------------------------------------------- 18.2

def training(case):
    return "images" in case[0]


def scales(sentence, **mistake):
    """gives, of 18.2."""
    return gives(sentence, lambda case: None if training(case) else world(case, **mistake))


def messages(got):
    """The most of any rank: (how many, bytes)."""
    return max((len(rank.calls), sum(call["bytes"] for call in rank.calls)) for rank in got)


def steps(case):
    return len(case[0]["grads"])


def sums(grads):
    return any(not np.isfinite(g.sum()) for g in grads)


def squares(grads):
    return any(not np.isfinite((g * g).sum()) for g in grads)


class GradScaler(Check):
    exercise = "18.2"
    tolerance = 1e-6
    signatures = [
        scales("the gradients are divided in float16: those that scaling has saved are flushed to 0 there, or rounded "
               "to a digit or two. First float32, then the division", divide=scaling.into_float16),
        scales("the gradients are divided in float16, in which a factor of 65,536 is inf. First float32, then the "
               "division", divide=scaling.by_float16),
        scales("the step is taken, with inf and NaN: one of these, and the weight is lost for good", skips=False),
        *[scales("inf and NaN are replaced, and the step is taken: the largest gradients of all become nothing, or "
                 "anything. Leave it out", skips=False, divide=divide)
          for divide in (scaling.no_inf, scaling.at_the_end)],
        scales("the gradients aren't divided: steps are as many times too large as the loss was",
               divide=scaling.as_it_is),
        scales("the gradients are multiplied by the factor again: they are to be divided by it",
               divide=scaling.multiplied),
        gives("step doesn't divide where nobody has called unscale_: then it must call it itself",
              lambda case: None if training(case) else scaling.undivided(case)),
        scales("what unscale_ has divided, step divides again: it must know that it was called",
               again=scaling.in_float32),
        scales("a second unscale_ between two updates goes unnoticed: RuntimeError. Who calls it twice clips twice, or "
               "has forgotten update", second="nothing"),
        scales("a second unscale_ between two updates divides again, and nobody notices: RuntimeError",
               second="divides"),
        scales("each rank decides for itself: where one has found inf, the others take their step, and the model is of "
               "two steps; factors drift apart as well. Ask all ranks", together=scaling.alone),
        scales("update doesn't know that the step was left out: what was found must be kept until then",
               factors=lambda given, found: 1.0, counts=scaling.unknowing),
        scales("a step is left out only if all ranks have found inf or NaN: one is enough", together=scaling.all_ranks),
        scales("only rank 0's answer counts: each rank has other parameters", together=lambda own: [own[0]] * len(own)),
        scales("NaN isn't looked for: inf - inf and 0 · inf are NaN, and who multiplies them spreads them",
               bad=lambda grads: any(np.isinf(g).any() for g in grads)),
        scales("inf isn't looked for, only NaN: what is too large for float16 is inf",
               bad=lambda grads: any(np.isnan(g).any() for g in grads)),
        scales("-inf isn't looked for", bad=lambda grads: any((g == np.inf).any() or np.isnan(g).any() for g in grads)),
        scales("the last array decides: an inf in one before it is forgotten", bad=lambda grads: scaling.not_finite(
            grads[-1:])),
        scales("only the first array is looked at", bad=lambda grads: scaling.not_finite(grads[:1])),
        scales("finite gradients count as overflow: their sum is too large for float16. Ask every element",
               bad=sums),
        scales("finite gradients count as overflow: their squares are too large for float16. Ask every element",
               bad=squares),
        scales("float16's largest number, 65,504, counts as overflow, and it is finite", bad=scaling.largest),
        scales("the step is left out, and the factor stays: the next one overflows as well",
               factors=lambda given, found: 1.0),
        scales("after inf the factor grows", factors=lambda given, found: given["growth_factor"] if found else 1.0),
        scales("the factor is divided by growth_factor, but backoff_factor was given",
               factors=lambda given, found: 1 / given["growth_factor"] if found else 1.0),
        scales("the factor is halved, but backoff_factor was given",
               factors=lambda given, found: 0.5 if found else 1.0),
        scales("the factor is doubled, but growth_factor was given",
               settings=lambda given: given | {"growth_factor": 2.0}),
        scales("the factor is doubled and halved, but growth_factor and backoff_factor were given",
               settings=lambda given: given | {"growth_factor": 2.0, "backoff_factor": 0.5}),
        scales("the factor begins at 65,536, but init_scale was given",
               settings=lambda given: given | {"init_scale": 2.0 ** 16}),
        scales("a step that was left out doesn't begin the count anew: growth_interval updates in a row are to be "
               "clean",
               counts=scaling.never_reset),
        scales("steps that were left out are counted as clean", counts=scaling.all_counted),
        scales("after growth the count goes on, and from then on the factor grows in each step",
               counts=scaling.grows_on),
        scales("after growth the count goes on, and the factor grows only once", counts=scaling.grows_once),
        scales("growth comes an update too late: after growth_interval clean ones, not one more",
               counts=scaling.one_later),
        scales("the factor grows after each clean update", counts=scaling.every_step),
        scales("the factor doesn't grow after growth_interval clean updates: gradients become smaller in training, and "
               "one overflow would be for good", counts=scaling.never),
        scales("what was found once is never forgotten: update must leave all ready for the next step", stuck=True),
        scales("the loss is scaled in float16, where 65,504 is the end: a loss of 1 times 65,536 is inf already. "
               "float32", product=np.float16),
        when("scale gives inf: in float16 a factor of 65,536 is inf already, and so is a loss of 1 times it. All in "
             "float32", lambda case, got: any(np.isinf(s) for rank in got for s in rank["scaled"])),
        when("the loss isn't scaled, or by another factor than the gradients are divided by: grads are what backward "
             "makes of scale(loss)", lambda case, got: any(s != scaling.LOSS * f for rank in got for s, f in zip(
                 rank["scaled"], [case[0]["settings"]["init_scale"], *rank["scales"]], strict=False))),
        when("the factor has a least or a greatest value, and none was asked for: it goes on halving, also below 1, "
             "and growing, for as long as gradients want it", lambda case, got: not training(case)
             and scaling.bounded(case, got)),
        when(scaling.wrong_factor, lambda case, got: not training(case) and scaling.wrong_factor(case, got)),
        when("a step is taken in which some gradient was inf or NaN: leave it out, whatever has been made of them",
             lambda case, got: not training(case) and scaling.stepped(case, got)),
    ]
    demands = [
        demand(lambda case, got: f"the values are right, but scale gives {got[0]['made'][0]}: float32 was asked for" +
               ", and all of backward becomes float64" * (got[0]["made"][0] == "float64"),
               lambda case, got: training(case) or not any(rank["made"] for rank in got)),
        demand(lambda case, got: f"the values are right, in {', '.join(sorted(set(got[0]['dtypes'])))}: float32 was "
                                 "asked for",
               lambda case, got: training(case) or all(d == "float32" for rank in got for d in rank["dtypes"])),
        demand("the gradients are right, but optimizer.step is called twice in one step, and the weights move twice",
               lambda case, got: training(case) or not any(rank["again"] for rank in got)),
        demand("right, but unscale_ behind step goes unnoticed where it was called before: RuntimeError, until update",
               lambda case, got: training(case) or all(all(rank["late"]) for rank in got)),
        demand(lambda case, got: f"right, but some rank calls {messages(got)[0]} collectives in {steps(case)} steps: "
                                 "one per step is enough, whatever the number of arrays",
               lambda case, got: training(case) or messages(got)[0] <= steps(case)),
        demand(lambda case, got: f"right, but some rank sends {messages(got)[1]} bytes in {steps(case)} steps: yes or "
                                 "no is a number, and no gradient has to travel",
               lambda case, got: training(case) or messages(got)[1] <= 8 * steps(case)),
    ]

    def cases(self, rng, ranks):
        return scaling.cases(rng, ranks) + [[network.training(rng)] * ranks] * (ranks == 2)

    def truth(self, case):
        return [{}] * len(case) if training(case) else world(case)

    def picture(self, runs, path):
        return drawing.scaled_training(*runs[2][-1], path)


# ---------------------------------------------------------------- 18.3

ELEMENTS, OWN = 50_000, 14      # bytes per parameter: 2 + 4 + 4 + 4


def remembers(sentence, **mistake):
    """gives, of 18.3."""
    return gives(sentence, lambda case: adam(case, **mistake) if "values" in case else {})


def paths(case):
    return "values" in case


def too_many(case, got):
    extra = got["held"] - OWN
    what = ("a float32 array too many, such as the divided gradients, or a copy of the masters" if 3 < extra < 5 else
            "a float16 array too many, such as the gradients" if 1 < extra < 3 else
            "masters and moments in float64?" if 11 < extra < 13 else "arrays that needn't outlive the step")
    return (f"right, but {got['held']:.1f} bytes per parameter are held after a step: 2 for the model's, 4 for the "
            f"master, 8 for m and v are {OWN}. It is {what}")


class MixedAdam(Check):
    exercise = "18.3"
    tolerance = 4e-6
    signatures = [
        when(lambda case, got: f"params are {got['dtypes'][0]}: the model's are to be float16",
             lambda case, got: got["dtypes"][0] != "float16"),
        when("the model's arrays are others than params: it holds those of the beginning. Write into them, p[...] = …",
             lambda case, got: got["moved"] != [0]),
        when("masters are nan: 1 - βᵗ is 0 where t is (it begins with 1), or what stands under the root is below 0 (v "
             "is a mean of squares)",
             lambda case, got: any(np.isnan(m).any() for step in got["masters"] for m in step)),
        when("params never change: the model goes on with its initial values, whatever the masters do",
             lambda case, got: all(np.array_equal(p, masters.half(value)) for step in got["params"]
                                   for p, value in zip(step, case["values"], strict=True))),
        when("masters never change: master = … only gives the name to another array, master -= … writes into the one "
             "that is kept", lambda case, got: all(np.array_equal(m, value) for step in got["masters"]
                                                   for m, value in zip(step, case["values"], strict=True))),
        when("masters hold numbers of 16 bits only. An update that is smaller than half the gap between these is lost, "
             "in each step anew: it must be computed, added and kept in float32", masters.only_16),
        remembers("masters begin as values that were rounded to 16 bits; they are the values themselves",
                  start=masters.half),
        remembers("masters are made anew from the params in each step, and what 16 bits have no room for is forgotten "
                  "with it: keep them", before=masters.half),
        remembers("the gradients aren't divided by scale: Adam nearly hides it, since m/√v doesn't know of a factor. "
                  "But eps does, and a factor that changes", divided=lambda g, scale: g),
        remembers("the gradients are divided in float16: the small ones are flushed to 0. First float32",
                  divided=lambda g, scale: masters.half(masters.float64(g) / scale)),
        remembers("the gradients are divided in float16, in which 65,536 is inf. First float32",
                  divided=lambda g, scale: g / np.float16(scale)),
        remembers("the square is taken of the scaled gradient, m of the divided one",
                  square=lambda g, scale: (g * scale) ** 2),
        remembers("the gradient is squared in float16: g² of what is above 256 is inf there, and below 0.0002 it is 0",
                  square=lambda g, scale: masters.half(masters.half(g * scale) ** 2) / scale ** 2),
        remembers("all steps divide by the first step's scale: it changes, and comes with each",
                  divided=lambda g, scale: g, of_first=True),
        remembers("the moments are of scaled gradients, and divided when they are used: of a factor that changes they "
                  "are a mixture. Divide first", divided=lambda g, scale: g,
                  after=lambda m, v, scale: (m / scale, v / scale ** 2)),
        remembers("v is divided by scale, but it is a mean of squares", divided=lambda g, scale: g,
                  after=lambda m, v, scale: (m / scale, v / scale)),
        remembers("the gradients are multiplied by scale again", divided=lambda g, scale: masters.float64(g) * scale),
        *[remembers(f"without the division by {without} the first steps are wrong", corrected=corrected)
          for without, corrected in (("1−β₁ᵗ and 1−β₂ᵗ", (False, False)), ("1−β₁ᵗ, of m,", (False, True)),
                                     ("1−β₂ᵗ, of v,", (True, False)))],
        *[remembers(f"{which} forgotten after each step: m = … only gives the name to another array, m[...] = … writes "
                    "into the one that is kept", forgets=forgets)
          for which, forgets in (("m is", (False,)), ("v is", (True,)), ("m and v are", (False, True)))],
        remembers("t stays 1: count the steps", clock=lambda t: 1),
        remembers("t is counted on with each array: in one step all have the same t", clock_of=lambda t, i, n:
                  (t - 1) * n + i + 1),
        when("t is 2 in the first step: it begins with 1 there", lambda case, got: masters.counted_on(case, got, [1])),
        when("t goes on where another optimizer has stopped: it belongs to the object (self), not to the class or the "
             "module", masters.counted_on),
        remembers("eps stands under the root: it is added to √v̂",
                  below=lambda root, eps, grown: np.sqrt(root ** 2 + eps)),
        remembers("eps is added to √v, before the division by √(1−β₂ᵗ): it is added to √v̂",
                  below=lambda root, eps, grown: root + eps / grown),
        *[remembers(sentence, settings=settings) for sentence, settings in masters.SETTINGS],
        remembers("where its gradient is 0 an array is passed over: its means shrink then, and it moves on by them",
                  rests=True),
        remembers("the scale is cut to a whole number: it is a float",
                  divided=lambda g, scale: masters.float64(g) / int(scale)),
        when("arrays of one shape have one m or v for all: each has its own", masters.one_shape),
        when("m or v, or both, are float16: g² of a gradient below 0.0002 is 0 there, and the step is divided by eps",
             lambda case, got: got["halves"] > 0 or masters.moments_in_16(case, got)),
        when("params below 2⁻¹⁴ are flushed to 0: float16 has smaller numbers, the subnormal ones, down to 2⁻²⁴",
             lambda case, got: max(got["apart"]) > 0 and masters.flushed(got)),
        when("params aren't masters in 16 bits: they go a way of their own. After each step they are rounded anew",
             lambda case, got: max(got["apart"]) > 0),
        when("the first optimizers are right, and not the last one, whose arrays have the shapes that the first one's "
             "had: m and v belong to the object (self), not to a default argument or the class", masters.again),
    ]
    demands = [
        demand(lambda case, got: f"masters are {got['dtypes'][1]}: float32 was asked for",
               lambda case, got: not paths(case) or got["dtypes"][1] == "float32"),
        demand(too_many, lambda case, got: "elements" not in case or got["held"] < OWN + 0.5),
    ]

    def cases(self, rng, ranks):
        return [*masters.cases(rng), {"elements": ELEMENTS}, network.fine_steps(rng)]

    def truth(self, case):
        return adam(case) if paths(case) else {}

    def picture(self, runs, path):
        return drawing.mixed_training(*runs[1][-1], path)
