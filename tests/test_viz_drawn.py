"""What stands in the pictures, read off matplotlib's figures before they are written."""

from types import SimpleNamespace

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn, viz
from minitorch_dist.ledger import Span
from minitorch_dist.timeline import Timeline
from minitorch_dist.viz import figure
from minitorch_dist.viz.curves import GREEN, RED, Run, _decades
from minitorch_dist.viz.graph import LAST, boxes, layers
from minitorch_dist.viz.timeline import COLORS, ON_THE_WIRE

random = np.random.default_rng(0)


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are drawn from here on; no file is written."""
    found = []
    monkeypatch.setattr(figure, "write", lambda drawing, path: found.append(drawing))
    return found


def texts(axes):
    return [text.get_text() for text in axes.texts]


def colour(shown):
    from matplotlib.colors import to_hex
    return to_hex(shown)


# ---------------------------------------------------------------- differentiation

def test_a_jacobian_is_filled_by_columns_then_by_rows(drawn):
    a = random.standard_normal((3, 5))
    viz.jacobian_filling(lambda x: mt.matmul(a, x), np.ones(5), "j.png")
    columns, rows = drawn[0].subfigs
    for strip, axis, stages, title, name in ((columns, 1, [1, 2, 4, 5], "jacfwd: column by column, 5 JVPs for 5 inputs",
                                              "JVP"), (rows, 0, [1, 2, 3], "jacrev: row by row, 3 VJPs for 3 outputs",
                                                       "VJP")):
        assert strip._suptitle.get_text() == title
        panels = [axes for axes in strip.axes if axes.images]
        assert [axes.get_xlabel() for axes in panels] == [f"after {n} {name}{'s' * (n > 1)}" for n in stages]
        for axes, done in zip(panels, stages, strict=True):
            image, frame = axes.images[0], axes.patches[0]
            shown = np.ma.filled(image.get_array(), np.nan)
            known = np.moveaxis(shown, axis, 0)
            np.testing.assert_allclose(known[:done], np.moveaxis(a, axis, 0)[:done])
            assert np.isnan(known[done:]).all()
            assert image.get_clim() == pytest.approx((-np.abs(a).max(), np.abs(a).max()))
            corner = [-0.5, -0.5]       # (across, down) of the newest column or row
            corner[1 - axis] += done - 1
            assert frame.get_xy() == tuple(corner)
            assert (frame.get_width(), frame.get_height()) == ((1, 3) if axis else (5, 1))
            assert sorted(texts(axes)) == sorted(f"{x:.1f}".replace("-0.0", "0.0") for x in shown[~np.isnan(shown)])


def test_a_jacobian_without_an_element_is_refused(drawn):
    for f, x in ((lambda x: x[:0], np.ones(2)), (lambda x: x, np.ones(0))):
        with pytest.raises(ValueError, match="nothing to draw"):
            viz.jacobian_filling(f, x, "j.png")


def test_memory_is_drawn_forward_then_backward(drawn):
    both = SimpleNamespace(peak={"activation": 300}, course=[
        ("activation", 100), ("parameter", 7), ("activation", 300), ("backward", 0), ("activation", 200),
        ("parameter", 8), ("activation", 50)])
    viz.memory({"both": both}, "m.png", unit=100)
    axes, = drawn[0].axes
    xs, ys = axes.lines[0].get_data()
    assert ys.tolist() == [0, 1, 3, 3, 2, 0.5] and (np.diff(xs) > 0).all()
    assert xs[:3].tolist() == [0, 0.5, 1] and xs[-1] == 2 and axes.get_xlim() == (0, 2)
    assert axes.get_legend().get_texts()[0].get_text() == "both: peak 3" and axes.get_ylabel() == "activations held"
    viz.memory({"one": SimpleNamespace(peak={"buffer": 3e6}, course=[("buffer", 3e6), ("buffer", 1e6)])}, "m.png",
               kind="buffer")
    axes, = drawn[1].axes
    assert axes.lines[0].get_ydata().tolist() == [0, 3, 1] and axes.get_xlim() == (0, 1)
    assert axes.get_ylabel() == "buffers held (MB)"


# ---------------------------------------------------------------- the tape

@pytest.mark.parametrize("shape, kept", [((5, 16), "640 bytes"), ((50, 100), "40.0 kB"), ((1000, 500), "4.0 MB")])
def test_a_box_says_what_it_keeps(drawn, shape, kept):
    x = mt.tensor(np.ones(shape), requires_grad=True)
    viz.graph(mt.exp(x), "g.png", [("what it takes", x)])
    axes, = drawn[0].axes
    size = str(list(shape)).replace(" ", "")
    assert texts(axes) == ["what it takes", f"float64{size}", "exp", f"float64{size}", f"keeps ans · {kept}"]
    assert colour(axes.patches[-1].get_facecolor()) == LAST[0]      # what the picture is of


def test_sixty_nodes_are_a_picture(drawn):
    y = mt.tensor(np.ones(2), requires_grad=True)
    for _ in range(59):
        y = y * 1.0
    assert viz.graph(y, "g.png").startswith("tape: 59 ops, 1 leaf\n") and len(drawn) == 1
    with pytest.raises(ValueError, match="61 nodes, and a picture holds 60"):
        viz.graph(y * 1.0, "g.png")


def test_leaves_without_a_name_are_numbered():
    w, x, y = (mt.tensor(np.ones(2), requires_grad=True) for _ in range(3))
    leaves = [line.split()[2:] for line in viz.graph_text(w * x + y, {"w": w}).splitlines() if line.endswith("leaf")]
    assert leaves == [["w", "float64[2]", "leaf"], *(["leaf", f"{i}", "float64[2]", "leaf"] for i in (1, 2))]


def test_as_many_lines_as_there_is_room_for():
    y = mt.tensor(np.ones(2), requires_grad=True)
    for _ in range(399):
        y = y * 1.0
    assert len(viz.graph_text(y).splitlines()) == 401 and "left out" not in viz.graph_text(y)
    assert "1 earlier lines left out" in viz.graph_text(y * 1.0)


def test_a_leaf_stands_right_above_the_first_op_that_uses_it():
    x, late = (mt.tensor(np.ones(2), requires_grad=True) for _ in range(2))
    shown = boxes(mt.exp(mt.tanh(mt.exp(x))) * late + late, {"x": x, "late": late})
    rows, links = layers(shown)
    row_of = {box.name: i for i, row in enumerate(rows) for box in row if box in shown and box.leaf}
    assert row_of == {"x": 0, "late": 3} and len(rows) == 6
    assert len(links) == len(set(links))
    twice = boxes(x * x)
    assert layers(twice)[1] == [tuple(twice)]       # of an input that is used twice there is one


# ---------------------------------------------------------------- curves

def run_of(losses, name="a", start=1, **more):
    return Run(name, np.arange(start, start + len(losses)), np.array(losses, float), {"ranks": 1, **more})


def test_long_runs_are_drawn_in_bins(drawn):
    """Of 401 steps two are a point: of losses their mean, of differences the largest."""
    losses = random.uniform(1, 2, 401)
    other = losses + random.uniform(0, 1e-5, 401)
    viz.curves([run_of(losses), run_of(other[:400], "b")], "c.png")
    top, bottom = drawn[0].axes
    wanted = [*losses[:400].reshape(200, 2).mean(1), losses[400]]
    np.testing.assert_allclose(top.lines[0].get_ydata(), wanted, rtol=1e-12)
    np.testing.assert_array_equal(top.lines[0].get_xdata(), np.arange(1, 402, 2))
    np.testing.assert_allclose(bottom.lines[0].get_ydata(), (other - losses)[:400].reshape(200, 2).max(1), rtol=1e-9)
    assert bottom.get_xlabel() == "optimizer step  (a point: 2 steps)"
    viz.curves([run_of(losses[:400])] * 2, "c.png")
    assert drawn[1].axes[1].get_xlabel() == "optimizer step" and len(drawn[1].axes[0].lines[0].get_xdata()) == 400


def test_the_step_where_runs_part_is_marked(drawn):
    viz.curves([run_of([3.0, 2.0, 1.0]), run_of([3.0, 2.5, 1.0], "b", ranks=2)], "c.png", 0.25)
    top, bottom = drawn[0].axes
    assert top.lines[-1].get_xdata() == [2, 2] and bottom.lines[-1].get_xdata() == [2, 2]
    assert "step 2" in texts(top) and "tolerance 0.25" in texts(bottom)
    assert top._left_title.get_text() == "DIFFERENT" and top._left_title.get_color() == RED
    assert [text.get_text() for text in top.get_legend().get_texts()] == ["1 rank · a", "2 ranks · b"]
    assert top.get_yscale() == "log"
    viz.curves([run_of([0.0, 0.0])] * 2, "c.png")
    assert drawn[1].axes[0].get_yscale() == "linear" and drawn[1].axes[0]._left_title.get_color() == GREEN
    assert len(drawn[1].axes[0].lines) == 2


def test_of_a_long_name_the_end_is_shown():
    assert run_of([1.0], "runs/" + "x" * 50 + " last words").label == "1 rank · …last words"


@pytest.mark.parametrize("largest", [0.0, 3e-9, 1e-4, 0.02, 7.0, 4e5])
@pytest.mark.parametrize("tolerance", [0.0, 1e-12, 1e-4, 2.0])
def test_an_axis_of_differences_shows_what_matters(largest, tolerance):
    """Three decades below the largest, four below the tolerance; five ticks at most, among them those of both ends."""
    low, high, every = _decades(largest, tolerance)
    assert high >= low and (high - low) % every == 0 and (high - low) // every <= 4
    for value, below in ((largest, 1e3), (tolerance, 1e4)):
        assert value == 0 or 10.0 ** low <= value / below * (1 + 1e-9) and 10.0 ** high >= value * (1 - 1e-9)


def test_a_learning_curve(drawn):
    losses, scores = np.linspace(2, 1, 801), random.uniform(1, 50, 801)
    run = Run("one", np.arange(1, 802), losses, {"data": "d", "ranks": 2, "qk_clip": 40.0,
                                                 "validation": [(400, 1.9), (801, 1.25)]}, scores)
    viz.learning_curve(run, "l.png")
    top, below = drawn[0].axes
    np.testing.assert_allclose(top.lines[0].get_ydata()[:267], losses.reshape(267, 3).mean(1), rtol=1e-12)
    assert top.lines[0].get_label() == "training, mean of 3 steps" and top.lines[1].get_ydata().tolist() == [1.9, 1.25]
    assert texts(top) == ["1.25"] and texts(below) == ["clipped to 40"] and below.get_xlabel() == "optimizer step"
    np.testing.assert_array_equal(below.lines[0].get_ydata(), scores.reshape(267, 3).max(1))
    assert below.lines[1].get_ydata() == [40, 40]
    viz.learning_curve(run_of(losses[:400]), "l.png")
    axes, = drawn[1].axes
    assert axes.lines[0].get_label() == "training, each step" and axes.lines[0].get_ydata().tolist() == \
        losses[:400].tolist()


@pytest.mark.filterwarnings("error")
def test_scores_that_nobody_clips_have_no_threshold(drawn):
    for summary in ({}, {"qk_clip": None}):
        viz.learning_curve(Run("one", np.arange(1, 4), np.ones(3), summary, np.array([1.0, 2, 3])), "l.png")
        below = drawn[-1].axes[1]
        assert texts(below) == [] and len(below.lines) == 1


# ---------------------------------------------------------------- models

@pytest.mark.parametrize("shape, grid, shown", [((2, 3, 2, 3), (2, 3), 6), ((10, 1, 2, 2), (2, 8), 10),
                                                ((40, 3, 3, 2), (21, 3), 63), ((2, 100, 1, 1), (1, 100), 100)])
def test_filters_lie_in_rows_of_an_output_each(drawn, shape, grid, shown):
    weight = random.standard_normal(shape)
    viz.filters(weight, "f.png")
    axes = drawn[0].axes[0]
    mosaic, (height, width) = np.ma.filled(axes.images[0].get_array(), np.nan), shape[2:]
    empty = np.isnan(mosaic)
    packed = mosaic[~empty.all(1)][:, ~empty.all(0)][::5, ::5]      # each number is a square of 5 · 5
    assert packed.shape == (grid[0] * height, grid[1] * width)
    for i, kernel in enumerate(weight.reshape(-1, height, width)[:shown]):
        row, column = divmod(i, grid[1])
        place = packed[row * height:(row + 1) * height, column * width:(column + 1) * width]
        np.testing.assert_array_equal(place, kernel)
    assert np.isnan(packed).sum() == (grid[0] * grid[1] - shown) * height * width
    said = f"{shape[0]} filters over {shape[1]} channel{'s' * (shape[1] > 1)}"
    of_all = shape[0] * shape[1]
    assert drawn[0]._suptitle.get_text() == said + (f", {shown} of {of_all} shown" if shown < of_all else "")


def test_filters_of_zeros_are_white(drawn):
    viz.filters(np.zeros((2, 3, 2, 2)), "f.png")
    assert drawn[0].axes[0].images[0].get_clim() == (-1, 1)


def test_attention_maps_name_what_looks_and_what_is_looked_at(drawn):
    weights = random.uniform(0, 1, (2, 3, 4))
    viz.attention_maps(weights, "a.png", "a b", title="block 1", sources="wxyz")
    heads = drawn[0].axes[:2]
    assert [axes.get_title() for axes in heads] == ["block 1, head 0", "head 1"]
    for axes, image in zip(heads, weights, strict=True):
        np.testing.assert_array_equal(axes.images[0].get_array(), image)
        assert [tick.get_text() for tick in axes.get_xticklabels()] == [*"wxyz"]
    assert [tick.get_text() for tick in heads[0].get_yticklabels()] == ["a", "␣", "b"]


def test_a_confusion_matrix_has_what_is_in_rows(drawn):
    viz.confusion_matrix([0, 0, 1, 2, 2, 2], [0, 1, 1, 0, 2, 2], "c.png", classes=3)
    axes, = drawn[0].axes
    assert {text.get_position(): text.get_text() for text in axes.texts} == {
        (0, 0): "1", (1, 0): "1", (2, 0): "·", (0, 1): "·", (1, 1): "1", (2, 1): "·",
        (0, 2): "1", (1, 2): "·", (2, 2): "2"}
    assert axes.images[0].get_array().tolist() == [[0, 1, 0], [0, 0, 0], [1, 0, 0]]
    assert axes._left_title.get_text() == "4 of 6 right (66.67 %)"
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("is", "taken for")


def test_a_text_s_surprise_is_its_nats(drawn):
    """In lines of two characters, and where the text has an end of line; what was given is left white."""
    surprise = np.array([np.nan, 0, 3, 6, 12, 1.5])
    viz.text_surprise("ab\ncde", np.exp(-surprise), "t.png", width=2)
    axes, = drawn[0].axes
    assert [(text.get_text(), text.get_position()) for text in axes.texts] == [
        ("a", (0, 0)), ("b", (1, 0)), ("⏎", (0, 1)), ("c", (0, 2)), ("d", (1, 2)), ("e", (0, 3))]
    grounds = {(patch.get_x() + 0.5, patch.get_y() + 0.5): patch.get_alpha() for patch in axes.patches}
    assert grounds == pytest.approx({(1, 0): 0, (0, 1): 0.5, (0, 2): 1, (1, 2): 1, (0, 3): 0.25})
    assert axes._left_title.get_text().startswith(f"{22.5 / 5:.2f} nats per character\n")


# ---------------------------------------------------------------- timelines

@pytest.mark.parametrize("seconds, unit, scale", [(2.0, "seconds", 1), (0.5, "milliseconds", 1e3),
                                                  (5e-4, "microseconds", 1e6)])
def test_bars_of_a_timeline(drawn, seconds, unit, scale):
    """Of each rank what it computes above what is on the wire, of which two at once are below each other."""
    def span(track, name, begin, end, detail=""):
        return Span(track, name, begin * seconds, end * seconds, detail)
    traced = Timeline()
    traced.spans = [[span("compute", "forward", 0, 0.25), span("compute", "wait", 0.5, 1),
                     span("communication", "all_reduce", 0, 0.75, "bucket 0, 8 bytes"),
                     span("communication", "send", 0.5, 1)], [span("compute", "backward", 0.25, 1)]]
    viz.timeline(traced, "t.png")
    axes, = drawn[0].axes
    bars = [(bar.get_x() / seconds / scale, bar.get_width() / seconds / scale, bar.get_y() + bar.get_height() / 2,
             colour(bar.get_facecolor()).upper()) for bar in axes.patches]
    wanted = [(0, 0.25, 0.5, COLORS["forward"]), (0.5, 0.5, 0.5, COLORS["wait"]), (0, 0.75, 1.5, ON_THE_WIRE),
              (0.5, 0.5, 2.5, ON_THE_WIRE), (0.25, 0.75, 3.85, COLORS["backward"])]
    for bar, expected in zip(bars, wanted, strict=True):
        assert bar[:3] == pytest.approx(expected[:3]) and bar[3] == expected[3]
    assert axes.get_xlabel() == unit
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    assert axes.get_yticks() == pytest.approx([0.5, 3.85])
    assert texts(axes) == ["forward", "wait", "bucket 0", "send", "backward"]
    assert all(text.get_visible() for text in axes.texts)


def test_a_text_that_is_wider_than_its_bar_is_left_out(drawn):
    traced = Timeline()
    traced.spans = [[Span("compute", "forward", 0.0, 10.0), Span("compute", "backward", 10.0, 10.05)]]
    viz.timeline(traced, "t.png")
    assert [text.get_visible() for text in drawn[0].axes[0].texts] == [True, False]


def test_no_setting_of_the_callers_changes(tmp_path):
    import matplotlib
    with matplotlib.rc_context({"font.size": 3.5, "axes.edgecolor": "red"}):
        before = dict(matplotlib.rcParams)
        viz.graph(nn.Linear(2, 3)(np.ones((1, 2), np.float32)), tmp_path / "g.svg")
        assert dict(matplotlib.rcParams) == before
