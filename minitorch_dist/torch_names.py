"""Names of PyTorch's that aren't here, and what to take: one table, which the AttributeErrors quote.

tests/test_torch_names.py sees to it that no name here exists, and that all do that are recommended.
"""

import inspect

NUMPY = "functions have NumPy's names and arguments"
STREAM = "numbers come from a stream: {} of mt.backend.stream(\"what for\", seed), a NumPy Generator"
WRITE = "under mt.no_grad(): p[...] = values; p += y, p -= y, p *= y, p /= y"
INITIAL = "nn.init's functions give arrays: under mt.no_grad(), p[...] = nn.init.{}; or a layer's weight_init="
NONE = "there is none; {}"
COPY = "x + 0.0 is a copy that is differentiated; mt.tensor(x.numpy()) one that isn't"
SCHEDULE = "mt.optim.LambdaLR(optimizer, a function of the step), as mt.optim.cosine gives one"
IN_NUMPY = "np.{}(x.numpy())"

NAMES = {
    "minitorch_dist": {
        **dict.fromkeys(("float16", "float32", "float64", "int8", "uint8", "int32", "int64", "long", "double", "half",
                         "float", "int", "bool", "dtype", "finfo"),
                        "dtypes are NumPy's, or their names: np.float32, \"float32\""),
        **dict.fromkeys(("pi", "inf", "nan"), "numbers are NumPy's: np.pi, np.inf, np.nan"),
        **dict.fromkeys(("array", "asarray", "FloatTensor", "LongTensor"), "mt.tensor(values, dtype), a copy"),
        **{old: f"mt.{new}: {NUMPY}" for old, new in (
            ("cat", "concatenate"), ("concat", "concatenate"), ("clamp", "clip"), ("mm", "matmul"), ("bmm", "matmul"),
            ("unsqueeze", "expand_dims"), ("permute", "transpose"), ("gather", "take_along_axis"),
            ("take_along_dim", "take_along_axis"), ("movedim", "moveaxis"), ("swapdims", "swapaxes"),
            ("repeat_interleave", "repeat"), ("range", "arange"), ("empty_like", "zeros_like"))},
        **{old: f"mt.{new}, or the operator" for old, new in (
            ("multiply", "mul"), ("subtract", "sub"), ("divide", "div"), ("negative", "neg"), ("gt", "greater"),
            ("ge", "greater_equal"), ("lt", "less"), ("le", "less_equal"), ("eq", "equal"), ("ne", "not_equal"))},
        **dict.fromkeys(("vstack", "hstack"), "mt.concatenate(xs, axis); mt.stack(xs) makes rows of vectors"),
        **{old: IN_NUMPY.format(old) for old in ("unique", "nonzero", "median", "histogram", "count_nonzero")},
        "isinf": "~(mt.isfinite(x) | mt.isnan(x))",
        "isclose": "np.isclose(x.numpy(), y.numpy())",
        "nan_to_num": "mt.where(mt.isnan(x), 0.0, x)",
        "log2": "mt.log(x) / np.log(2)",
        "log10": "mt.log(x) / np.log(10)",
        "unbind": "list(x)",
        "rand_like": "mt.rand(x.shape, dtype=x.dtype)",
        "clone": COPY,
        "Parameter": "mt.nn.Parameter(values)",
        "Size": "a shape is a tuple",
        "set_num_threads": "OMP_NUM_THREADS and OPENBLAS_NUM_THREADS, set before Python starts",
        **dict.fromkeys(("tril", "triu"), "by a mask of NumPy's: mt.where(np.tril(np.ones((t, t), bool)), x, 0.0)"),
        **{old: STREAM.format(new) for old, new in (
            ("randint", "integers"), ("randperm", "permutation"), ("multinomial", "choice"))},
        "abs": "mt.absolute(x), or x.abs()",
        "pow": "x ** y",
        "detach": "x.detach()",
        "masked_fill": "x.masked_fill(mask, value)",
        "bernoulli": "mt.rand(x.shape) < p",
        "full_like": "mt.full(x.shape, value, dtype=x.dtype)",
        "empty": "mt.zeros",
        "roll": "mt.concatenate([x[-n:], x[:-n]])",
        "round": "mt.floor(x + 0.5)",
        "cumprod": NONE.format("of numbers above 0 mt.exp(mt.cumsum(mt.log(x), axis))"),
        "as_tensor": "mt.from_numpy shares an array's memory, mt.tensor copies it",
        "randn_like": "mt.randn(x.shape, dtype=x.dtype)",
        "linspace": "mt.tensor(np.linspace(…))",
        "diag": "of a vector x * np.eye(len(x), dtype=x.dtype); of a matrix x[i, i], i = np.arange(len(x))",
        "cdist": "mt.sqrt(mt.sum(mt.square(x[:, None] - y[None]), axis=-1))",
        "meshgrid": "np.meshgrid(…, indexing=\"ij\"), of arrays",
        "searchsorted": "np.searchsorted(x.numpy(), y.numpy())",
        "GradScaler": "mt.optim.GradScaler",
        "seed": "mt.manual_seed(0)",
        "allclose": "np.allclose(x.numpy(), y.numpy())",
        "norm": "mt.sqrt(mt.sum(mt.square(x)))",
        "save": "np.savez(path, **model.state_dict()); mt.checkpoints keeps a run, from any ranks for any",
        "load": "model.load_state_dict(np.load(path)); mt.checkpoints.load reads what ranks have saved",
        "device": "a device is a string: \"cpu\", \"cuda\", \"cuda:1\"",
        "cuda": "a device is a string: x.to(\"cuda\"); `python -m minitorch_dist doctor` says what there is",
        "distributed": "mt.comm.world() has rank, size and the collectives; mpirun starts the ranks",
        "autograd": "mt.grad, mt.vjp, mt.jvp, y.backward(create_graph=True); a rule of one's own: mt.custom_vjp",
        "functional_call": "mt.nn.functional_call(model, values, x)",
        "func": "mt.grad, mt.vjp, mt.jvp, mt.jacrev, mt.jacfwd, mt.hessian, mt.hvp",
        "vmap": NONE.format("ops take leading axes; gradients of single samples: backward() for each"),
        "amp": "mt.autocast(\"bfloat16\"), mt.optim.GradScaler",
        "jit": "mt.compile(f)",
        "utils": "mt.checkpoint(f)(x), mt.data.Loader",
        "inference_mode": "mt.no_grad()",
        "set_grad_enabled": "mt.enable_grad(), mt.no_grad()",
        "profiler": "mt.trace() for what runs when; mt.ledger.record(memory=True) for calls, bytes and memory",
        "set_default_dtype": "layers and functions that make arrays take dtype=",
        "use_deterministic_algorithms": "DistributedDataParallel(…, exact=True); one process has the same bits always",
        "is_tensor": "isinstance(x, mt.Tensor)",
    },
    "minitorch_dist.nn": {
        **dict.fromkeys(("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm"),
                        "nn.BatchNorm takes any number of axes; when wrapped, over all ranks' samples"),
        "ModuleDict": "attributes, or add_module(name, module)",
        **dict.fromkeys(("ParameterList", "ParameterDict"), "attributes: setattr(self, name, nn.Parameter(values))"),
        **dict.fromkeys(("AdaptiveAvgPool2d", "AdaptiveAvgPool1d"), "x.mean(dim=(2, 3))"),
        "SiLU": "x * mt.sigmoid(x)",
        "PReLU": "mt.maximum(x, 0.0) + slope * mt.minimum(x, 0.0); slope: nn.Parameter(np.full(1, 0.25, np.float32))",
        "Upsample": "nearest: mt.repeat(mt.repeat(x, 2, axis=2), 2, axis=3)",
        "Softmax": "x.softmax(dim=-1)",
        "LogSoftmax": "x.log_softmax(dim=-1)",
        "CrossEntropyLoss": "nn.cross_entropy(logits, labels)",
        "NLLLoss": "nn.cross_entropy(logits, labels) of the logits themselves",
        "nll_loss": "nn.cross_entropy(logits, labels) of the logits themselves",
        **dict.fromkeys(("BCEWithLogitsLoss", "BCELoss", "binary_cross_entropy"),
                        "nn.binary_cross_entropy_with_logits(logits, targets)"),
        **dict.fromkeys(("L1Loss", "l1_loss"), "mt.mean(mt.absolute(x - y))"),
        **dict.fromkeys(("KLDivLoss", "kl_div"), "mt.sum(p * (mt.log(p) - mt.log(q)))"),
        "ConvTranspose1d": NONE.format("a Module with mt.conv_transpose1d"),
        "ConvTranspose2d": NONE.format("a Module with mt.conv_transpose2d"),
        "AvgPool1d": "mt.avg_pool1d(x, kernel_size)",
        "MaxPool1d": "mt.max_pool1d(x, kernel_size)",
        "ELU": "mt.where(x > 0, x, mt.expm1(mt.where(x > 0, 0.0, x)))",
        "Softplus": "-nn.loss.log_sigmoid(-x)",
        "InstanceNorm2d": "nn.GroupNorm(channels, channels)",
        "TransformerEncoder": "nn.Sequential of nn.TransformerBlock",
        "TransformerDecoder": "nn.Sequential of nn.TransformerBlock(…, causal=True, cross=True)",
        "Transformer": "two nn.Sequential of nn.TransformerBlock, the second's with causal=True, cross=True",
        "MSELoss": "nn.mse_loss(prediction, target)",
        "functional": "ops are mt.relu, mt.softmax …; losses nn.cross_entropy, nn.mse_loss",
        "utils": "mt.optim.clip_grad_norm_",
        "MultiheadAttention": "nn.MultiHeadAttention, and nn.CrossAttention for keys of another sequence",
        "TransformerEncoderLayer": "nn.TransformerBlock",
        "TransformerDecoderLayer": "nn.TransformerBlock(…, causal=True, cross=True)",
        **dict.fromkeys(("RNN", "LSTM", "GRU"), NONE.format("a Module of one's own that loops over time")),
        "DataParallel": "mt.parallel.DistributedDataParallel",
    },
    "minitorch_dist.nn.init": {
        "normal_": INITIAL.format("normal(p.shape, std)"),
        "uniform_": INITIAL.format("uniform(p.shape, bound)"),
        "kaiming_normal_": INITIAL.format("he_normal(p.shape)"),
        "kaiming_uniform_": INITIAL.format("he_uniform(p.shape)"),
        "xavier_normal_": INITIAL.format("xavier_normal(p.shape)"),
        "xavier_uniform_": INITIAL.format("xavier_uniform(p.shape)"),
        **dict.fromkeys(("zeros_", "ones_", "constant_"), "under mt.no_grad(): p[...] = 0.0"),
    },
    "minitorch_dist.data": {
        **dict.fromkeys(("DataLoader", "DistributedSampler"),
                        "mt.data.Loader(inputs, labels, batch_size, rank=…, size=…), of two arrays"),
        "TensorDataset": "mt.data.Arrays(inputs, labels)",
        **dict.fromkeys(("Subset", "random_split"), "slices of the arrays: mt.data.Loader(inputs[:n], labels[:n], …)"),
        "ConcatDataset": "mt.data.Mixture, with weights; mt.data.StoredTokens takes several files",
    },
    "minitorch_dist.comm": {
        "init_process_group": "mpirun starts the ranks, and mt.comm.world() is their group",
        "init_device_mesh": "mt.comm.DeviceMesh(dp=2, tp=-1)",
        "get_rank": "mt.comm.world().rank",
        "get_world_size": "mt.comm.world().size",
        **{name: f"mt.comm.world().{name}, of arrays" for name in (
            "all_reduce", "broadcast", "all_gather", "reduce_scatter", "send", "recv", "barrier")},
        "new_group": "mt.comm.world().split(color), on all ranks",
        "is_initialized": "mt.comm.world() is there always; alone its size is 1",
        "destroy_process_group": "leave it out: the end of the program does it",
        "ReduceOp": "ops are names: world.all_reduce(x, \"max\")",
        "COMM_WORLD": "mt.comm.world()",
    },
    "minitorch_dist.parallel": {
        **dict.fromkeys(("FullyShardedDataParallel", "FSDP"), "mt.parallel.fully_shard(model, comm, stage=3)"),
        **dict.fromkeys(("DDP", "DataParallel"), "mt.parallel.DistributedDataParallel"),
        "ZeroRedundancyOptimizer": "mt.parallel.fully_shard(model, comm, stage=1)",
        **dict.fromkeys(("parallelize_module", "ColwiseParallel", "RowwiseParallel"),
                        "from minitorch_dist.parallel.tensor import parallelize_module, plan_of"),
        **dict.fromkeys(("Pipeline", "PipelineStage", "pipelining"),
                        "from minitorch_dist.parallel.pipelines import Pipeline, cut_gpt, cut_sequential"),
    },
    "minitorch_dist.optim": {
        **dict.fromkeys(("lr_scheduler", "StepLR", "MultiStepLR", "ExponentialLR", "OneCycleLR", "LinearLR",
                         "ConstantLR", "PolynomialLR", "SequentialLR", "ChainedScheduler", "MultiplicativeLR",
                         "CyclicLR", "CosineAnnealingWarmRestarts"), SCHEDULE),
        "CosineAnnealingLR": "mt.optim.LambdaLR(optimizer, mt.optim.cosine(steps, warmup))",
        "EMA": "averages of weights are in minitorch_dist.compress: ExponentialMovingAverage",
        **dict.fromkeys(("RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "Rprop"),
                        NONE.format("mt.optim.AdamW, or mt.optim.Adagrad")),
        **dict.fromkeys(("LBFGS", "ASGD"), NONE.format("mt.optim.SGD")),
        "Shampoo": NONE.format("mt.optim.Muon, whose steps also have one length in all directions of a matrix"),
        "ReduceLROnPlateau": "write into optimizer.param_groups, of each group its \"lr\"",
        "clip_grad_value_": "mt.optim.clip_grad_norm_",
        "swa_utils": "averages of weights are in minitorch_dist.compress: from minitorch_dist.compress import soup",
    },
    "Optimizer": {
        "add_param_group": "an optimizer has the groups that it was made of: optim.Combined(this one, one of the rest)",
        "defaults": "each group of optimizer.param_groups has all settings",
    },
    "LambdaLR": {
        **dict.fromkeys(("get_last_lr", "get_lr"),
                        "the rates stand in optimizer.param_groups, of each group its \"lr\""),
        "last_epoch": "schedule.steps",
        **dict.fromkeys(("state_dict", "load_state_dict"), "it has no state but .steps: schedule.go_to(steps)"),
    },
    "Communicator": {
        **{old: f"world.{new}" for old, new in (
            ("Get_rank", "rank"), ("get_rank", "rank"), ("Get_size", "size"), ("get_world_size", "size"),
            ("Barrier", "barrier()"), ("Split", "split(color)"), ("new_group", "split(color)"))},
        **{old: f"world.{new}, of arrays; of other things world.broadcast_object, world.all_gather_object"
           for old, new in (("allreduce", "all_reduce"), ("Allreduce", "all_reduce"), ("bcast", "broadcast"),
                            ("Bcast", "broadcast"), ("allgather", "all_gather"), ("Allgather", "all_gather"),
                            ("all_gather_into_tensor", "all_gather"), ("reduce_scatter_tensor", "reduce_scatter"),
                            ("alltoall", "all_to_all"), ("Send", "send"), ("Recv", "recv"))},
    },
    "Tensor": {
        "t": "x.T",
        "round": "mt.floor(x + 0.5)",
        "mT": "x.swapaxes(-1, -2)",
        "contiguous": "leave it out: view and reshape copy where they must",
        **dict.fromkeys(("clone", "copy"), COPY),
        **{old: f"x {op} y" for old, op in (("multiply", "*"), ("subtract", "-"), ("divide", "/"),
                                            ("true_divide", "/"))},
        **dict.fromkeys(("view_as", "reshape_as"), "x.reshape(y.shape)"),
        **{old: f"x.{new}" for old, new in (("movedim", "moveaxis"), ("swapdims", "swapaxes"), ("ndimension", "ndim"),
                                            ("take_along_dim", "gather"), ("unflatten", "reshape"),
                                            ("get_device", "device"))},
        **{old: IN_NUMPY.format(old) for old in ("unique", "median")},
        **dict.fromkeys(("tril", "triu"), "by a mask of NumPy's: mt.where(np.tril(np.ones((t, t), bool)), x, 0.0)"),
        "quantile": "np.quantile(x.numpy(), q)",
        "negative": "-x",
        "expand_as": "x.expand(y.shape)",
        "is_contiguous": "leave it out: view and reshape copy where they must",
        "detach_": "x = x.detach()",
        "new_ones": "mt.ones(shape, dtype=x.dtype)",
        "new_full": "mt.full(shape, value, dtype=x.dtype)",
        "new_empty": "mt.zeros(shape, dtype=x.dtype)",
        "new_tensor": "mt.tensor(values, dtype=x.dtype)",
        "is_floating_point": "mt.backend.is_floating(x.dtype)",
        **dict.fromkeys(("element_size", "itemsize"), "x.dtype.itemsize"),
        "nbytes": "x.data.nbytes",
        "allclose": "np.allclose(x.numpy(), y.numpy())",
        "equal": "np.array_equal(x.numpy(), y.numpy())",
        "where": "mt.where(condition, x, y)",
        "outer": "mt.outer(x, y)",
        "cumprod": NONE.format("of numbers above 0 mt.exp(mt.cumsum(mt.log(x), axis))"),
        "isinf": "~(mt.isfinite(x) | mt.isnan(x))",
        "nan_to_num": "mt.where(mt.isnan(x), 0.0, x)",
        "masked_select": "x[mask]",
        "select": "x[:, i] for dim 1",
        "narrow": "x[:, start:start + length] for dim 1",
        "type": "x.to(dtype)",
        "type_as": "x.to(y.dtype)",
        "new_zeros": "mt.zeros(shape, dtype=x.dtype)",
        "is_cuda": "x.device",
        "grad_fn": "mt.viz.graph(y, path) draws and names what made it",
        "nelement": "x.numel(), or x.size as in NumPy",
        "norm": "x.square().sum().sqrt()",
        "roll": "mt.concatenate([x[-n:], x[:-n]])",
        "unbind": "list(x); along another axis: list(x.moveaxis(dim, 0))",
        "nonzero": "np.nonzero(x.numpy())",
        **dict.fromkeys(("scatter", "scatter_"), "x.at[index].set(values)"),
        **dict.fromkeys(("scatter_add", "scatter_add_", "index_add", "index_add_"), "x.at[index].add(values)"),
        **dict.fromkeys(("add_", "sub_", "mul_", "div_", "copy_", "fill_", "zero_", "normal_", "uniform_",
                         "clamp_", "clip_", "exp_", "sqrt_", "neg_", "masked_fill_", "addcmul_", "addcdiv_", "lerp_",
                         "relu_", "sigmoid_", "tanh_", "square_"), WRITE),
    },
    "Module": {
        **dict.fromkeys(("float", "double", "half", "bfloat16"), "model.to(\"float32\"), before its optimizer is made"),
        "register_parameter": "self.name = nn.Parameter(values)",
        "register_full_backward_hook": "hooks on tensors: y.register_hook(f), p.register_post_accumulate_grad_hook(f)",
        "get_parameter": "dict(model.named_parameters())[name]",
        "get_submodule": "dict(model.named_modules(remove_duplicate=False))[path]",
        "compile": "mt.compile(model)",
    },
}

# Arguments of functions, and what to give instead.
ARGUMENTS = {
    **dict.fromkeys(("dim", "dims"), "axis="),
    "keepdim": "keepdims=",
    "unbiased": "correction=1 or 0",
    "split_size_or_sections": "indices_or_sections=",
}

# Settings of layers and wrappers that aren't here.
SETTINGS = {
    "inplace": "leave it out: results are new arrays",
    "device": "model.to(\"cuda\"), when it is made",
    "batch_first": "leave it out: the batch is the first axis",
    "padding_idx": "leave it out, and mask: a loss has ignore_index",
    "padding_mode": "mt.pad(x, …) before it, which pads with a value",
    **dict.fromkeys(("elementwise_affine", "affine"), "freeze its weight and bias: requires_grad_(False)"),
    "track_running_stats": NONE.format("train() takes a batch's own statistics, eval() the running ones"),
    **dict.fromkeys(("device_ids", "output_device"), "leave it out: model.to(\"cuda\") comes before"),
    "find_unused_parameters": "leave it out: they are found, and stand in unused_parameters",
    **dict.fromkeys(("gradient_as_bucket_view", "static_graph"), "leave it out: it is always so"),
    **dict.fromkeys(("mesh", "device_mesh"), "comm=, an axis of it: mesh[\"dp\"]"),
    "process_group": "comm=, mt.comm.world() or an axis of a mesh",
    **dict.fromkeys(("fused", "foreach", "capturable"), "leave it out: a step is one pass over flat arrays always"),
    "maximize": "negate the loss",
}


def refuse_settings(cls, settings):
    """TypeError for one of PyTorch's that the class doesn't take, which says what to do."""
    for name in settings:
        if name in SETTINGS:
            takes = inspect.signature(cls.__init__).parameters
            if name not in takes and all(p.kind is not p.VAR_KEYWORD for p in takes.values()):
                raise TypeError(f"{cls.__name__} takes no {name}=. Here: {SETTINGS[name]}")


class Elsewhere:
    """A name of PyTorch's on a class: who asks for it gets an AttributeError that says what to take. (A __getattr__
    would do, but slows a Tensor's empty slots, and hides what a property of a user's raises.)"""

    def __init__(self, text):
        self.text = text

    def __set_name__(self, owner, name):
        self.name = name

    def __get__(self, instance, owner):
        raise AttributeError(f"{owner.__name__!r} object has no attribute {self.name!r}. Here: {self.text}")


def tell(cls, names):
    """Put a table's names on a class."""
    for name, text in names.items():
        setattr(cls, name, Elsewhere(text))
        vars(cls)[name].__set_name__(cls, name)


def of_module(module):
    """A __getattr__ for a module: what it hasn't, by the table's words."""
    def __getattr__(name):
        here = NAMES[module].get(name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}" + (f". Here: {here}" if here else ""))
    return __getattr__
