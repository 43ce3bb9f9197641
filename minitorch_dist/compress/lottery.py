"""Lottery tickets: small subnetworks that learn as well as the whole one, if they start where it started.

    train the whole network, from its initial values θ₀
    repeat:  prune the smallest `share` of what is left · put the rest back to θ₀ (or to θ_k, early in training) · train

What makes a ticket is that mask and initial values belong together: the same mask on other initial values, or as many
weights at random places on the same ones, learn worse. Both controls are trained beside it.

Sources: Frankle & Carbin 2019, "The lottery ticket hypothesis"; Frankle et al. 2020, "Linear mode connectivity and the
lottery ticket hypothesis" (rewinding to step k).
"""

from dataclasses import dataclass

from ..backend import whole, wholes
from . import prune


@dataclass(frozen=True)
class Round:
    """One round: the share of prunable weights that stay, the scores of ticket and controls (None: not trained), and
    the ticket's masks."""

    kept: float
    ticket: float
    reinitialised: float | None
    random: float | None
    masks: dict


@dataclass(frozen=True)
class Tickets:
    """rounds  [Round], the first one dense; start: the state dict that every ticket starts from. Print it."""

    rounds: list
    start: dict

    def __str__(self):
        lines = ["weights kept    ticket  reinitialised  random mask"]
        for r in self.rounds:
            cells = ("" if score is None else f"{score:.4g}" for score in (r.reinitialised, r.random))
            lines.append(f"{100 * r.kept:10.1f} %  {r.ticket:8.4g}  " + "{:>13}  {:>11}".format(*cells))
        return "\n".join(lines)


def lottery_ticket(make_model, train, rounds, share=0.2, rewind=0, scope="layer", names=None, controls=None, seed=0):
    """Tickets by iterative magnitude pruning.

    make_model  make_model(seed) -> the model with initial values from that seed
    train       train(model, after_step, start) -> a score (say, the accuracy): trains the model in place from step
                `start` of its training on to the end, calling after_step() after each optimizer.step(). Data and rates
                depend on the step alone
    rounds      of pruning; after r of them (1 - share)^r of the weights are left
    rewind      k: tickets start from the whole network's values after k steps, and at step k
    controls    the rounds (1 … rounds) in which the controls are trained, too; default: the last one
    scope, names   as for prune.magnitude

    The reinitialised control has the ticket's masks and make_model(seed + round)'s values, from step 0; the random one
    as many weights in each layer, at random places, and the ticket's own values. If make_model wraps the model in
    DistributedDataParallel, all ranks get the same tickets.
    """
    rounds, rewind = whole("rounds", rounds), whole("rewind", rewind)
    if not (0 < share < 1 and rounds >= 0 and rewind >= 0):
        raise ValueError(f"lottery_ticket: share={share}, rounds={rounds}, rewind={rewind}; the share must be between "
                         "0 and 1, the others at least 0")
    controls = {rounds} - {0} if controls is None else set(wholes("controls", controls))
    if odd := sorted(controls - set(range(1, rounds + 1))):
        raise ValueError(f"lottery_ticket: controls {odd}: there are the rounds 1 to {rounds}")
    model, steps = make_model(seed), 0
    start = model.state_dict()

    def note():
        nonlocal steps, start
        steps += 1
        if steps == rewind:
            start = model.state_dict()
    found = [Round(1.0, train(model, note, 0), None, None, prune.magnitude(model, 0.0, scope, names))]
    if steps < rewind:
        raise ValueError(f"lottery_ticket: rewind={rewind}, but train has called after_step {steps} times")
    for r in range(1, rounds + 1):
        masks = prune.magnitude(model, 1 - (1 - share) ** r, scope, names, within=found[-1].masks)
        model.load_state_dict(start)
        scores = [_trained(model, masks, train, rewind), None, None]
        if r in controls:
            scores[1] = _trained(make_model(seed + r), masks, train, 0)
            other = make_model(seed)
            other.load_state_dict(start)
            gone = {name: 1 - mask.mean() for name, mask in masks.items()}
            scores[2] = _trained(other, prune.random(other, gone, seed + r, list(masks)), train, rewind)
        kept = sum(int(mask.sum()) for mask in masks.values()) / sum(mask.size for mask in masks.values())
        found.append(Round(kept, *scores, masks))
    return Tickets(found, start)


def _trained(model, masks, train, start):
    """The score of a model that is trained under masks."""
    return train(model.train(), prune.Pruning(model, masks).apply, start)
