"""detect_anomaly: which op made the first NaN or infinity, and in which line of the user's."""

import inspect

import numpy as np
import pytest

import minitorch_dist as mt


def leaf(*values):
    return mt.tensor(np.array(values), requires_grad=True)


def here(offset=0):
    """file:line of the caller."""
    frame = inspect.currentframe().f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno + offset}"


def test_anomaly_in_forward_names_op_and_line():
    x = leaf(-1.0, 4.0)
    with mt.detect_anomaly(), np.errstate(all="ignore"):
        with pytest.raises(FloatingPointError) as e:
            mt.sqrt(x)
        assert f"'sqrt' made NaN out of finite inputs, at {here(-1)}: mt.sqrt(x)" in str(e.value)
        with pytest.raises(FloatingPointError) as e:
            mt.grad(lambda z: mt.sum(mt.log(z * 0.0)))(np.ones(2))
        assert f"'log' made inf out of finite inputs, at {here(-1)}: " in str(e.value)
    with mt.detect_anomaly(), pytest.raises(FloatingPointError, match="'sqrt' made NaN"), np.errstate(all="ignore"):
        mt.jvp(mt.sqrt, (np.array([-1.0]),), (np.ones(1),))
    with mt.detect_anomaly(), pytest.raises(FloatingPointError, match="'sqrt' made NaN|'sqrt' made inf"), \
            np.errstate(all="ignore"):
        mt.jvp(mt.sqrt, (np.array([0.0]),), (np.ones(1),))      # the value is fine, its tangent is not


def test_anomaly_in_backward_names_op_and_the_line_of_the_forward():
    x = leaf(0.0, 4.0)
    with mt.detect_anomaly(), np.errstate(all="ignore"):
        line = here(1)
        y = mt.sqrt(x)
        z = (y * 0.0).sum()
        with pytest.raises(FloatingPointError) as e:
            z.backward()
    assert "the backward of 'sqrt' made NaN out of a finite cotangent" in str(e.value)
    assert line in str(e.value) and "y = mt.sqrt(x)" in str(e.value)


def test_anomaly_with_several_outputs_checkpoints_and_custom_rules():
    with mt.detect_anomaly(), np.errstate(all="ignore"):
        x = leaf(1.0, 4.0)
        a, b = mt.split(x, [1])
        (a * 2.0 + b).sum().backward()
        np.testing.assert_array_equal(x.grad.numpy(), [2.0, 1.0])

        with pytest.raises(FloatingPointError, match="backward of 'sqrt' made inf"):
            mt.checkpoint(lambda x: mt.sqrt(x * 0.0) + x)(x).sum().backward()

        f = mt.custom_vjp(lambda x: x * 1.0).defvjp(lambda x: (x * 1.0, None), lambda r, ct: (ct * np.nan,))
        line = here(1)
        y = f(x).sum()
        with pytest.raises(FloatingPointError) as e:
            y.backward()
        assert "made NaN" in str(e.value) and line in str(e.value)
        f = mt.custom_vjp(lambda x: x).defvjp(lambda x: (np.log(x - x), None), lambda r, ct: (ct,))
        with pytest.raises(FloatingPointError) as e:
            f(x)
        assert "made inf out of finite inputs" in str(e.value) and here(-1) in str(e.value)


def test_a_user_folder_whose_name_begins_like_the_package_is_the_users(tmp_path):
    from minitorch_dist.autodiff.tensor import user_line
    package = mt.__file__.rsplit("/", 1)[0]
    scope = {"user_line": user_line}
    exec(compile("def f():\n    return user_line()", package + "_demo/train.py", "exec"), scope)
    assert scope["f"]().startswith(package + "_demo/train.py:2")


def test_infinities_that_come_from_outside_are_no_anomaly():
    x = leaf(1.0, np.inf)
    with mt.detect_anomaly():
        (x * 2.0).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), [2.0, 2.0])
