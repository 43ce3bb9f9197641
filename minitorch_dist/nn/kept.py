"""What a KeyValueCache (decoding.py) keeps of each attention, by its kind. Attention calls it its context, and asks it
where the new positions stand and where the other keys are.

    keys      KeptKeys      keys and values, or the last ones that a window reaches
    blocks    KeptBlocks    keys and values, and each block's mean key
    latents   KeptLatents   what keys and values are made of
    state     KeptState     one matrix per head, however much was read
    memory    KeptMemory    keys and values of another sequence
"""

from ..autodiff.ops.attention import ALL, band_of, banded_attention, part_of_band
from ..autodiff.ops.chosen_blocks import attend_to_blocks, means_of
from ..autodiff.primitive import lower
from ..backend import in_float32, module_of, xp

OF_ONE_DOCUMENT = "a cache of keys and values is of one document per row; it was given documents"


class Places:
    """Which positions the tokens of this read have."""

    drops = watches = False     # weights, scores: nobody trains here

    def __init__(self, cache):
        self.cache = cache

    def length(self, time):
        """How long the sequences are with so many more tokens."""
        return self.cache.past + time

    def positions(self, time):
        """int64 (time,), where the tokens are."""
        return xp.arange(self.cache.past, self.cache.past + time, like=self.cache.tokens)

    def whole(self, documents):
        """Of whole sequences the numbers of their documents: there are none."""
        raise ValueError(OF_ONE_DOCUMENT)

    def __repr__(self):
        return f"a cache of keys and values after {self.cache.past} tokens"


class KeptKeys(Places):
    """One attention's keys and values (batch, kv_heads, room, size), of the positions from `start` on. Called (q, k, v,
    causal, scale, documents, window, sinks=), it is attention of the new positions to these and to themselves."""

    keys = values = None
    start = 0

    @property
    def arrays(self):
        """Keys and values, None for what there isn't."""
        return self.keys, self.values

    def __call__(self, q, k, v, causal, scale=None, documents=None, window=None, **more):
        if documents is not None:
            raise ValueError(OF_ONE_DOCUMENT)
        start, room = self._place(k.shape[2], window)
        self.keys, self.values = self._with(k, self.keys, start, room), self._with(v, self.values, start, room)
        self.start = start
        return self.attend(q, self.keys, self.values, scale, window, **more)

    def _place(self, time, window):
        """(the first position that is kept with so many new ones, for how many there is room). What no window reaches
        any more is forgotten where room is wanted, some positions at once, so that few have to be moved."""
        past, length = self.cache.past, self.cache.length
        if not past:
            self.keys = self.values = None
            self.start = 0
        if window is None:
            return 0, length
        first = max(0, past - window + 1)
        if first < self.start:
            raise ValueError(f"a cache of keys and values of a window of {window} positions has forgotten those before "
                             f"{self.start}, and was taken back to {past} tokens, for which it wants those from "
                             f"{first} on: take back what the last read has brought, or less")
        if self.keys is not None and past + time - self.start <= self.keys.shape[2]:
            return self.start, self.keys.shape[2]
        return first, min(length, max(2 * window, past + time - first))

    def _with(self, new, kept, start, room):
        """An array of so much room in which stand the positions from `start` on, the new ones (batch, heads, time,
        size) behind those that were kept."""
        batch, heads, time, size = new.shape
        past = self.cache.past
        if kept is None or start != self.start or room != kept.shape[2]:
            old, kept = kept, module_of(lower(new)).zeros((batch, heads, room, size), new.dtype)
            if old is not None:
                kept[:, :, :past - start] = old[:, :, start - self.start:past - self.start]
        kept[:, :, past - start:past - start + time] = lower(new)
        return kept

    def attend(self, q, keys, values, scale, window=None, **more):
        """Attention of new positions to all that is kept up to them, or to what a window reaches of it."""
        here = slice(self.cache.past, self.cache.past + q.shape[2])
        there = slice(self.start if window is None else max(self.start, here.start - window + 1), here.stop)
        k, v = (x[:, :, there.start - self.start:there.stop - self.start] for x in (keys, values))
        # Of no tokens at all nothing is seen.
        return banded_attention(q, k, v, part_of_band(band_of(True, window), here, there) or ALL, scale, **more)


class KeptBlocks(KeptKeys):
    """Of a BlockAttention: keys and values, room for whole blocks of them, and each whole block's mean key, by which a
    new position chooses without looking at the keys."""

    means = None

    @property
    def arrays(self):
        return self.keys, self.values, self.means

    def blocks(self, q, k, v, size, count, scale):
        """ops.block_attention of the new positions to these and to what is kept."""
        start, room = self._place(k.shape[2], None)
        room += -room % size
        self.keys, self.values = self._with(k, self.keys, start, room), self._with(v, self.values, start, room)
        past = self.cache.past
        until = past + k.shape[2]
        if not past:
            self.means = module_of(self.keys).zeros((*k.shape[:2], room // size, k.shape[3]), self.keys.dtype)
        whole = slice(past // size, until // size)
        self.means[:, :, whole] = means_of(self.keys[:, :, whole.start * size:whole.stop * size], size)
        if count >= -(-until // size):
            return self.attend(q, self.keys, self.values, scale)
        return in_float32(attend_to_blocks, lower(q), self.keys, self.values, self.means[:, :, :until // size], until,
                          size, count, scale)[0]


class KeptLatents(KeptKeys):
    """Of a LatentAttention: one array (batch, 1, length, kv_rank + rope_size), which has the values in its keys."""

    @property
    def kept(self):
        """What is there, the new positions too: (batch, 1, past + time, kv_rank + rope_size)."""
        return self.keys[:, :, :self.cache.past + self.cache.tokens.shape[1]]

    def keep_latents(self, new):
        """Keep latents and turned keys of new positions, (batch, 1, time, kv_rank + rope_size)."""
        start, room = self._place(new.shape[2], None)       # which forgets what was read before the first token
        self.keys = self._with(new, self.keys, start, room)

    def attention(self, q, rank, scale):
        """Attention of the new positions to all that is kept; the first `rank` features of a key are its value."""
        return self.attend(q, self.keys, self.keys[..., :rank], scale)


class KeptMemory(Places):
    """A CrossAttention's keys and values (batch, kv_heads, sources, size), of the memory that the first tokens have
    been read with."""

    arrays = None, None

    def of_memory(self, attention, memory):
        """Keys and values."""
        if not self.cache.past:
            self.arrays = tuple(lower(x).copy() for x in attention.keys_values(memory))     # views of one array
        kept = self.arrays[0].shape
        if (kept[0], kept[2]) != tuple(memory.shape[:2]):
            raise ValueError(f"KeyValueCache: memory {tuple(memory.shape)}, where the tokens before have been read "
                             f"with one of {kept[0]} rows and {kept[2]} sources: all reads have the same")
        return self.arrays


class KeptState(Places):
    """Of a LinearAttention or a DeltaAttention: one array (batch, heads, size, size), what all positions read so far
    have left behind; and, where the cache may be taken back, that of before the last read, and what the read has
    brought."""

    state = None
    until = 0       # how many positions these are
    before = None   # (how many had been read, the state then, keys, values and whatever else came of each position)

    @property
    def arrays(self):
        """The state, None for what there isn't; and what is kept for taking back."""
        return (self.state, *(self.before or ())[1:])

    def states(self, recurrence, parts, documents=None):
        """recurrence.attention of the new positions' parts (q, k, v, …); the state becomes that behind them."""
        if documents is not None:
            raise ValueError(OF_ONE_DOCUMENT)
        past = self.cache.past
        start = self._at(past, recurrence)
        y, self.state = self._read(recurrence, parts, start)
        self.until = past + parts[0].shape[2]
        if self.cache.take_back:
            self.before = past, start, *(lower(x).copy() for x in parts[1:])      # they are views of more
        return y

    def _at(self, past, recurrence):
        """The state behind so many positions; None: nothing is before them."""
        if past in (0, self.until):
            return self.state if past else None
        if self.before is None or not self.before[0] <= past < self.until:
            raise ValueError(f"a cache of states, which {self.until} tokens have made, was taken back to {past}: what "
                             "has gone into a state can't be taken out. KeyValueCache(…, take_back=True) keeps what "
                             "it takes to take back what the last read has brought, or less; past=0 begins anew")
        read, start, *came = self.before
        k, *others = (x[:, :, :past - read] for x in came)
        return self._read(recurrence, (k, k, *others), start)[1]

    @staticmethod
    def _read(recurrence, parts, start):
        """recurrence.read_on's, the state as an array that holds nothing besides: at first it is a view of several."""
        y, state = recurrence.read_on(*parts, start)
        return y, lower(state) if start is not None else lower(state).copy()


# By an attention's `keeps`.
KEPT = {"keys": KeptKeys, "blocks": KeptBlocks, "latents": KeptLatents, "state": KeptState, "memory": KeptMemory}
