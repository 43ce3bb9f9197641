"""What dot_test is tried with: the names of programs.pairs, and what is said where it errs."""

# Random u and v come within 1e-4 of hiding an error once in 10,000 draws, and a check draws some 20 times.
RIGHT, WRONG = 1e-9, 1e-8
GOOD = ("an unsquare matrix", "several outputs, several inputs", "everything zero")
BAD = {
    "elements in another order": "dot_test doesn't see that a transpose holds the right numbers in the wrong places: "
    "ones add them up in any order. Draw u and v at random",
    "the same matrix, not transposed": "dot_test takes W for its own transpose: with ones, or with u and v alike, ⟨u, "
    "W·v⟩ and ⟨W·u, v⟩ are the same number for any W. Draw u and v at random, each for itself",
    "the outputs in another order": "dot_test doesn't see that the outputs' cotangents are mixed up: with the same "
    "number in all of u, their order makes no difference. Draw every element at random",
    "the inputs in another order": "dot_test doesn't see that the inputs' cotangents are mixed up: with the same "
    "number in all of v, their order makes no difference. Draw every element at random",
    **{f"{which} cotangents in each other's place": f"dot_test doesn't see that {which} cotangents have changed "
       f"places: {array} for one is drawn as for the other. Draw each array anew"
       for which, array in (("the inputs'", "v"), ("the outputs'", "u"))},
    "the second input's cotangent is zero": "dot_test doesn't see that the second input's cotangent is wrong: ⟨Jᵀu, v⟩ "
    "sums over all inputs",
    "the second output is forgotten": "dot_test doesn't see that the transpose forgets the second output: ⟨u, Jv⟩ sums "
    "over all outputs",
    "the sign": "dot_test doesn't see a wrong sign: the difference counts, not that of the magnitudes",
    "all cotangents are zero": "dot_test doesn't see a transpose that gives nothing but zeros",
    "a cotangent of nothing": "dot_test doesn't see a cotangent where the output is always zero: with J·v for u, u is "
    "zero there as well. Draw u by itself, whatever v is",
    "2 times too large, of small numbers": "dot_test doesn't see a factor of 2 where the numbers are small, about "
    "1e-30: the difference must be divided by the larger of the two",
}
