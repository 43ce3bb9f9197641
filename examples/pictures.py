"""Draw what a trained model has learned, from the folder that its run left.

    python mnist_demo/train.py --model cnn --out runs/cnn
    python examples/pictures.py runs/cnn            # curve, filters, confusion matrix
    python examples/gpt.py --out runs/gpt
    python examples/pictures.py runs/gpt            # curve, attention maps, a text with its surprise

The pictures go into the same folder.
"""

import sys
from pathlib import Path

import numpy as np

import minitorch_dist as mt
from minitorch_dist import data, nn, program, training, viz
from minitorch_dist.checkpoints.npz import read_npz
from minitorch_dist.data.text import addition, read_text

sys.path.insert(0, str(Path(__file__).parent))      # also where another program runs this file
from gpt import network, with_more_ahead  # noqa: E402

DRAWN = "confusion.png", "filters.png", "surprise.png", "attention-*.png"       # of the model; not each has all


def classifier(facts, folder, args):
    """Pictures of a run of mnist_demo/train.py, pipeline.py or fully_sharded.py."""
    model = {"mlp": lambda: nn.mlp(facts["hidden"]), "cnn": nn.lenet,
             "transformer": lambda: nn.ImageTransformer(facts["pieces"])}[facts["model"]]()
    load(model, facts, folder)
    dataset = data.load(facts["data"], args.data_dir)
    images = dataset.test_images.astype(np.float32)
    with mt.no_grad():
        predictions = np.concatenate([model(images[i:i + 500]).numpy().argmax(1) for i in range(0, len(images), 500)])
    viz.confusion_matrix(dataset.test_labels, predictions, folder / "confusion.png")
    if facts["model"] == "cnn":
        viz.filters(model[1].weight.numpy(), folder / "filters.png")
    if facts["model"] == "transformer":
        maps(model, model.embed(model.cut(images[:1])) + model.position.weight, folder)


def language_model(facts, folder, args):
    """Pictures of a run of examples/gpt.py."""
    if facts["text"]:
        text = read_text(facts["text"])
        vocabulary, rows, given = text.vocabulary, text.validation[None, :8 * facts["length"] + 1], 1
    else:
        problems = addition(2, seed=facts["seed"])
        vocabulary, rows, given = problems.vocabulary, problems.test[:12], problems.question
    model = network(facts, vocabulary)
    load(with_more_ahead(model, facts), facts, folder)
    length, probabilities = facts["length"], np.full(rows.shape, np.nan)
    with mt.no_grad():
        for i in range(given, rows.shape[1]):       # each character out of as many before it as the model sees
            p = mt.softmax(model(rows[:, max(0, i - length):i])).numpy()[:, -1]
            probabilities[:, i] = p[np.arange(len(rows)), rows[:, i]]
        shown = rows[:1, :min(length, 24, rows.shape[1] - 1)]
        x = model.embed(shown)
        x = x + model.position(np.arange(shown.shape[1])) if facts["positions"] == "learned" else x
    probabilities = np.pad(probabilities, ((0, 0), (0, 1)), constant_values=np.nan)     # the line's end
    viz.text_surprise("".join(vocabulary.decode(row) + "\n" for row in rows), probabilities.ravel(),
                      folder / "surprise.png", note="" if facts["text"] else "sums: last digit first")
    maps(model, x, folder, vocabulary.decode(shown[0]))


def maps(model, x, folder, labels=None):
    """attention-0.png, attention-1.png …: a picture per block, of the first sample of x. (Multi-head latent attention
    doesn't tell its weights.)"""
    with mt.no_grad():
        for i, block in enumerate(model.blocks):
            if not isinstance(block.attention, nn.LatentAttention):
                viz.attention_maps(block.attention.weights(block.norm1(x))[0], folder / f"attention-{i}.png", labels,
                                   title=f"block {i}")
            x = block(x)


def load(model, facts, folder):
    """The run's parameters, into a model in evaluation mode."""
    state = read_npz(folder / "parameters.npz")
    try:
        model.load_state_dict({name: value.astype(np.float32) for name, value in state.items()})
    except KeyError as error:
        raise ValueError(f"{folder}: parameters.npz and summary.json are of different models: {error.args[0]}") \
            from error
    if facts["parameters_sha256"] != training.parameters_sha256(model) and facts.get("dtype") != "float64":
        raise ValueError(f"{folder}: parameters.npz and summary.json are of different runs")
    model.eval()


def main(argv=None):
    """The program; returns the exit status."""
    program.one_process("pictures.py")
    p = program.ArgumentParser(prog="pictures.py", description=__doc__)
    p.add_argument("run", type=Path, help="a run's folder")
    p.add_argument("--data-dir", help="folder with MNIST's four files (default: $MINITORCH_DATA, cache, download)")
    args = p.parse_args(argv)
    try:
        run = viz.read_run(args.run)
        if "curve" in run.summary:
            raise ValueError(f"{args.run}: is a run of grpo.py, which has drawn curve.png itself: it is left as it is")
        for old in (path for name in DRAWN for path in args.run.glob(name)):    # another model's, of an earlier run
            old.unlink()
        viz.learning_curve(run, args.run / "curve.png")
        (classifier if "model" in run.summary else language_model)(run.summary, args.run, args)
    except KeyError as error:
        print(f"pictures.py: {args.run}/summary.json has no {error}: it is no run of this version's train.py, "
              "fully_sharded.py, pipeline.py or gpt.py, and its curve alone is drawn", file=sys.stderr)
        return 2
    except (OSError, ValueError, data.DataNotFound) as error:
        print(f"pictures.py: {program.in_words(error)}", file=sys.stderr)
        return 2
    print("\n".join(str(path) for path in sorted(args.run.glob("*.png"))))
    return 0


if __name__ == "__main__":
    with program.reader_may_leave():
        sys.exit(main())
