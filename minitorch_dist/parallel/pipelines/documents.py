"""Packed documents (data/packing.py) in the stages of a pipeline.

    stages = cut_sequential(model, mesh["pp"].size)
    pipeline = Pipeline([stages[mesh["pp"].rank]], mesh["pp"], schedule)
    pipeline.run(batch, loss_sum, packed=True, …)       # its inputs (n, time, 2): tokens, and numbers of documents

No stage is sent which documents a row has: all ranks of a pipeline have the batch's rows, as they have its labels, take
the numbers from there, and give them to the layers that take some. What travels is what travels without. That the ranks
have the same numbers is agreed on before anything is sent.
"""

import zlib
from inspect import Parameter, signature

from ...autodiff.ops.attention import numbered
from ...backend import to
from ...data.packing import apart
from ...nn.containers import Sequential, called
from ...nn.transformer import GPT


class Stage(Sequential):
    """Layers one after another. Documents, integers (batch, time), are given to those that take them.

    context   None, or the Context of the whole model, whose part of the sequences these layers work on: a stage
              without an attention knows it by nothing else. It is none of the stage's modules
    """

    def __init__(self, *layers, context=None):
        super().__init__(*layers)
        object.__setattr__(self, "of_context", context)

    def forward(self, x, documents=None):
        for name, layer in self._modules.items():
            with called(layer, name):
                x = call(layer, x, documents)
        return x


def call(module, x, documents, **more):
    """module(x, documents, …), or module(x, …) where there are none, or it takes none."""
    given = (x,) if documents is None or not takes_documents(module) else (x, documents)
    return module(*given, **more)


def takes_targets(module):
    """Whether forward, below what wraps it, has a parameter of this name."""
    return "targets" in signature(inside(module).forward).parameters


def inside(module):
    """What a wrapper wraps."""
    while "" in module._modules:
        module = module._modules[""]
    return module


def takes_documents(module):
    """Whether forward's second parameter has this name; or it has one for whatever there is, as wrappers and Sequential
    have, and all modules inside, to which they hand it on, take documents."""
    parameters = signature(module.forward).parameters
    if "documents" in parameters:
        return [*parameters].index("documents") == 1 and parameters["documents"].kind != Parameter.KEYWORD_ONLY
    below = module._modules.values()
    return any(p.kind == Parameter.VAR_POSITIONAL for p in parameters.values()) and bool(below) and \
        all(map(takes_documents, below))


def readers(module):
    """The modules below that do something with documents, attention among them."""
    return [m for m in module.modules() if "documents" in signature(m.forward).parameters and not isinstance(m, Stage)]


def blind(module, path="the stage"):
    """The first module from the top that takes no documents and is a reader, or has some inside, as a text; or None."""
    found = readers(module)
    if found and not takes_documents(module):
        return f"{path}, of class {type(module).__name__}"
    if not found or module in found:
        return None
    return next(filter(None, (blind(m, name or path) for name, m in module._modules.items())), None)


def told(chunks, inputs, packed, reads):
    """What a pipeline's inputs are, as a text: packed rows by their documents' shape and checksum. ValueError or
    TypeError for rows or chunks that don't fit `packed`; reads: whether some rank's chunk has layers that take
    documents."""
    if packed and not reads:
        raise ValueError("Pipeline.run: packed=True, and no stage of this pipeline takes documents: leave it out")
    if packed:
        return f"packed rows, documents {_checked(chunks, inputs)}"
    if reads and inputs.ndim == 3 and inputs.shape[2] == 2 and inputs.dtype.kind in "iu":
        raise ValueError(f"Pipeline.run: inputs {inputs.shape} of {inputs.dtype} are packed rows, and attention "
                         "would look from one document into another: say packed=True")
    return "plain rows"


def _checked(chunks, inputs):
    """The documents' shape and checksum, as a text."""
    if inputs.ndim != 3:
        raise ValueError(f"Pipeline.run: inputs {tuple(inputs.shape)} with packed=True; packed rows are (n, time, 2)")
    tokens, documents = apart(inputs)
    text = f"{tuple(documents.shape)}, crc32 {zlib.crc32(to(numbered(documents, tokens.shape), 'cpu').tobytes()):08x}"
    if found := next(filter(None, map(blind, chunks)), None):
        raise ValueError(f"Pipeline.run: packed=True, and {found}, takes no documents as its second argument, and they "
                         "are for it, or for layers inside of it: give its forward a second parameter of this name, or "
                         "its layers to cut_sequential one by one")
    return text


def of_chunk(chunk, documents):
    """The numbers for a chunk's layers: where its attention has a part of the sequences (context_parallel, slices),
    those of whole ones. Collective there. A GPT that isn't cut asks for them itself."""
    if isinstance(inside(chunk), GPT):
        return documents
    contexts = [m.context for m in readers(chunk) if getattr(m, "context", None) is not None]
    return contexts[0].whole(documents) if contexts else documents
