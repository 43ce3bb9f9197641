"""Federated learning: the data stay where they are, with many clients; models travel.

    each round, a server with values w
        draws some of the clients, and sends them w                      ψ numbers down to each
        client k trains on its own n_k samples: w → w_k                  E epochs of SGD, in batches of B
        receives w_k - w, perhaps in few bits (parallel/encodings.py)   what the message takes up
        w += Σ n_k/n (w_k - w),  n = Σ n_k

With one epoch, a batch of all of a client's samples, and all clients, that is one step of gradient descent on all data
together (FederatedSGD); with more epochs per round the same accuracy takes fewer rounds, as long as the clients don't
part too far: where each has a few classes only, they do.

The ranks of a communicator share the clients of a round, and all have the same model. The updates are added along a
balanced binary tree over the clients (parallel/exact.py): the curve has the same bits on 1, 2, 4 … ranks.

Source: McMahan et al. 2017, "Communication-efficient learning of deep networks from decentralized data". With an
optimizer at the server: Reddi et al. 2021, "Adaptive federated optimization".
"""

import hashlib
import math
import operator
from dataclasses import dataclass, is_dataclass

import numpy as np

from ... import backend
from ...autodiff.primitive import lower
from ...autodiff.writes import wrote
from ...backend import whole
from ...comm import world
from ...comm.reduction import is_power_of_two
from ...comm.together import together
from ...data.loader import Shard
from ...data.sampler import Sampler
from ...nn import cross_entropy
from ...optim import SGD
from ..encodings import Channel, Whole, nbytes
from ..exact import BinaryCounter
from ..same_model import broadcast, check_same_model
from ..wrapping import check_alone, check_unwrapped
from .fragments import outer_step
from .inner import settings_of

# ---------------------------------------------------------------- who has which samples


def split_evenly(count, clients, seed=0):
    """A list of index arrays, one per client: 0 … count-1 shuffled and dealt out, even to one sample."""
    _check_clients(count, clients)
    return np.array_split(backend.stream("federated, evenly", seed).permutation(count), clients)


def split_by_label(labels, clients, shards=2, seed=0):
    """Each client gets `shards` stretches of the samples in the order of their labels, and so few classes: McMahan et
    al.'s pathological split."""
    _check_clients(len(labels), clients * shards)
    stretches = np.array_split(np.argsort(labels, kind="stable"), clients * shards)
    order = backend.stream("federated, by label", seed).permutation(clients * shards)
    return [np.concatenate([stretches[i] for i in order[k * shards:(k + 1) * shards]]) for k in range(clients)]


def split_by_dirichlet(labels, clients, alpha, seed=0):
    """Each class is divided over the clients in shares drawn from Dirichlet(alpha): a small alpha gives clients with
    few classes and of unequal sizes, a large one even splits. A client may get no sample. Source: Hsu et al. 2019,
    "Measuring the effects of non-identical data distribution for federated visual classification"."""
    _check_clients(len(labels), clients)
    if not 0 < alpha < math.inf:
        raise ValueError(f"split_by_dirichlet: alpha is {alpha}; it must be above 0, and finite")
    random, parts = backend.stream("federated, dirichlet", seed), [[] for _ in range(clients)]
    for label in np.unique(labels):
        samples = random.permutation(np.flatnonzero(labels == label))
        ends = np.round(np.cumsum(random.dirichlet(np.full(clients, alpha)))[:-1] * samples.size).astype(int)
        for part, found in zip(parts, np.split(samples, ends), strict=True):
            part.append(found)
    return [np.concatenate(part) for part in parts]


def _check_clients(count, parts):
    if not 1 <= parts <= count:
        raise ValueError(f"{count:,} samples can't be split into {parts:,} parts that have one each")


# ---------------------------------------------------------------- rounds

@dataclass(frozen=True)
class Round:
    """What a round was.

    number         from 0
    clients        those that were drawn, in order
    samples        that they have, together
    loss           mean over the samples, of the first epoch of each client's training, as it went
    down, up       bytes that all of them received, and sent
    """

    number: int
    clients: tuple
    samples: int
    loss: float
    down: int
    up: int


class FederatedAveraging:
    """FedAvg.

    model       the server's, with the same values on all ranks; without buffers (BatchNorm's statistics aren't
                parameters, and nobody would average them). On a GPU clients train there; messages are the host's
    inputs, labels   all samples; a client looks at its own only
    clients     one index array per client
    fraction    the share of the clients, in (0, 1], that is drawn for a round, at least one; without samples none is
    epochs      E, local epochs
    batch_size  B, of local steps; None: all of a client's samples (with epochs=1 that is FederatedSGD)
    lr          of local SGD
    encoding    of the updates: see parallel/encodings.py
    server      None, or an optimizer of the model's parameters, which takes -Σ n_k/n (w_k - w) for a gradient; SGD with
                lr=1 is FedAvg
    comm        whose ranks share the clients of a round; a power of two (default: all ranks)
    loss_sum    loss_sum(model, shard) -> the SUM of a data.loader.Shard's losses (default: cross-entropy)

    ValueError where these don't fit, TypeError for parts of an epoch or of a sample.
    """

    def __init__(self, model, inputs, labels, clients, *, lr, fraction=0.1, epochs=1, batch_size=10, encoding=None,
                 server=None, comm=None, loss_sum=None, seed=0):
        check_unwrapped(model)
        check_alone(model, "FederatedAveraging")
        if len(inputs) != len(labels):
            raise ValueError(f"inputs and labels must be equally many, got {len(inputs)} and {len(labels)}")
        epochs, batch_size = whole("epochs", epochs), None if batch_size is None else whole("batch_size", batch_size)
        if not 0 < fraction <= 1 or epochs < 1 or (batch_size is not None and batch_size < 1):
            raise ValueError(f"fraction={fraction}, epochs={epochs}, batch_size={batch_size}: the fraction must be "
                             "above 0 and at most 1, the others at least 1")
        if buffers := [name for name, _ in model.named_buffers()]:
            raise ValueError(f"{buffers[0]} is a buffer, which no client's update holds: take a model without "
                             "(LayerNorm instead of BatchNorm)")
        self.clients = [_places(k, client, len(inputs)) for k, client in enumerate(clients)]
        self.present = [k for k, client in enumerate(self.clients) if client.size]
        if not self.present:
            raise ValueError("no client has a sample")
        self.model, self.inputs, self.labels = model, inputs, labels
        self.drawn = max(1, round(fraction * len(self.present)))
        self.epochs, self.batch_size, self.seed = epochs, batch_size, operator.index(seed)
        self.encoding = Whole() if encoding is None else encoding
        self.loss_sum = loss_sum or _cross_entropy
        self.comm, self.rounds = world() if comm is None else comm, 0
        # The tree's leaves: clients of a round, and zeros up to a power of two that the ranks divide.
        self.leaves = max(1 << (self.drawn - 1).bit_length(), self.comm.size)
        if not is_power_of_two(self.comm.size):
            raise ValueError(f"FederatedAveraging: the clients' updates are added along a balanced binary tree, so the "
                             f"number of ranks must be a power of two, not {self.comm.size}")
        check_same_model(model, self.comm, "FederatedAveraging", lr=lr, epochs=epochs, batch_size=batch_size,
                         fraction=fraction, seed=seed, encoding=_described(self.encoding),
                         clients=_digest(self.clients), server=server and settings_of(server))
        for name, p in model.named_parameters():
            broadcast(self.comm, lower(p), name)
        self.server = server
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.device = next((p.device for p in self.params.values()), "cpu")
        self.local = SGD(self.params.values(), lr)
        if len({p.dtype for p in self.params.values()}) > 1:
            raise ValueError(f"parameters of several dtypes, {sorted({str(p.dtype) for p in self.params.values()})}: "
                             "their updates are added up in one array; take one")

    def round(self):
        """Train once more; returns the Round, the same on all ranks. Collective. Where it raises, the model has the
        server's values again, and the next round is this one."""
        number = self.rounds
        chosen = np.sort(backend.stream("federated, clients", self.seed, number).choice(
            self.present, self.drawn, replace=False)).tolist()
        samples = sum(self.clients[k].size for k in chosen)
        start = {name: np.array(backend.to(p.data, "cpu")) for name, p in self.params.items()}
        try:
            sums = self._trained(number, chosen, samples, start)
        finally:
            self._set(start)
            self.model.zero_grad()
        self._update(start, sums)
        self.rounds += 1
        size = sum(p.data.nbytes for p in self.params.values())
        return Round(number, tuple(chosen), samples, float(sums[-2]), size * len(chosen), int(sums[-1]))

    def _trained(self, number, chosen, samples, start):
        """All clients' `_leaf`s, added up; Diverged on all ranks where an update can't be encoded."""
        sums = together(self.comm, lambda: self._trained_here(number, chosen, samples, start))
        self.comm.all_reduce(sums, exact=True)
        return sums

    def _trained_here(self, number, chosen, samples, start):
        """The same of this rank's clients."""
        total, each = BinaryCounter(), self.leaves // self.comm.size
        for leaf in range(self.comm.rank * each, (self.comm.rank + 1) * each):
            # Neighbours in the tree are far apart in `chosen`: all ranks have about equally many, not zeros the last.
            place = _reversed(leaf, self.leaves)
            total.add(self._leaf(number, chosen[place], samples, start) if place < len(chosen)
                      else self._zeros(start))
        return total.total()

    def _zeros(self, start):
        return np.zeros(sum(value.size for value in start.values()) + 2, np.float64)

    def _leaf(self, number, client, samples, start):
        """float64: this client's n_k/n (w_k - w), as the server decodes it; its part of the loss; bytes it has sent."""
        channel = Channel(self.encoding, {name: value.shape for name, value in start.items()},
                          next(iter(start.values())).dtype, ("federated", self.seed, number, client))
        self._set(start)
        loss = self._train(number, client, channel)
        messages = channel.encode({name: backend.to(p.data, "cpu") - start[name] for name, p in self.params.items()})
        weight, leaf, end = self.clients[client].size / samples, self._zeros(start), 0
        for update in channel.decode(messages).values():
            leaf[end:end + update.size] = weight * update.ravel()
            end += update.size
        leaf[-2:] = loss / samples, nbytes(messages)
        return leaf

    def _train(self, number, client, channel):
        """A client's epochs, from the values that the model has; the sum of the first epoch's losses."""
        mine = self.clients[client]
        sampler = Sampler(mine.size, self.batch_size or mine.size, _stream_of(self.seed, number, client))
        total, step = 0.0, 0
        for epoch in range(self.epochs):
            for order in sampler.epoch(epoch):
                rows = mine[order]
                shard = Shard(0, self.inputs[rows], self.labels[rows], (0, rows.size)).to(self.device)
                self.model.zero_grad()
                with backend.random_scope(sampler.seed, step, rows.size, shard.rows, 1):
                    loss = self.loss_sum(self.model, shard)
                    (loss * (1 / rows.size)).backward()
                for name, p in self.params.items():
                    if p.grad is not None and (projected := channel.project(name, p.grad.data)) is not p.grad.data:
                        p.grad.data[...] = projected
                        wrote(p.grad.data, "FederatedAveraging")
                self.local.step()
                total += loss.item() if epoch == 0 else 0.0
                step += 1
        return total

    def _update(self, start, sums):
        """The server's step, from its values and the mean of the updates."""
        end, gradients = 0, []
        for name, p in self.params.items():
            update = sums[end:end + p.size].reshape(p.shape)
            end += p.size
            if self.server is None:
                self._write(p, (start[name] + update).astype(p.dtype))
            else:
                gradients.append((p, backend.to((-update).astype(p.dtype), self.device)))
        if self.server is not None:
            outer_step(self.server, gradients)
        self.model.zero_grad()

    def _set(self, values):
        for name, p in self.params.items():
            self._write(p, values[name])

    def _write(self, p, values):
        lower(p)[...] = backend.to(values, self.device)
        wrote(lower(p), "FederatedAveraging")


def _cross_entropy(model, shard):
    return cross_entropy(model(shard.inputs), shard.labels, reduction="sum")


def _places(k, client, count):
    """A client's samples as an index array."""
    places = np.asarray(client)
    if places.size and (places.ndim != 1 or places.dtype.kind not in "iu" or places.min() < 0 or places.max() >= count):
        raise ValueError(f"client {k} is {places.dtype} of shape {places.shape}, from {places.min()} to "
                         f"{places.max()}; it must be places of its samples, 1-d integers from 0 to {count - 1}")
    return places


def _digest(arrays):
    return hashlib.sha256(b"".join(f"{a.size}:".encode() + a.astype(np.int64).tobytes() for a in arrays)).hexdigest()


def _described(thing):
    """What has to be equal on all ranks: dataclasses say it themselves."""
    return repr(thing) if is_dataclass(thing) else type(thing).__name__


def _stream_of(*key):
    """One integer for a key: a seed of its own."""
    return backend.stream_key("federated, training", *key)


def _reversed(number, width):
    """`number`'s bits, of as many as width - 1 has, the other way round."""
    bits = (width - 1).bit_length()
    return int(format(number, f"0{bits}b")[::-1], 2) if bits else 0
