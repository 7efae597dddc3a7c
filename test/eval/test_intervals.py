import pytest

from vla_ros_lab.eval.intervals import mcnemar, paired, wilson


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_intervals_are_the_published_ones(successes: int, trials: int, low: float, high: float) -> None:
    """Newcombe, "Two-sided confidence intervals for the single proportion", 1998, table I, method 3."""
    assert wilson(successes, trials) == pytest.approx((low, high), abs=5e-5)
    assert wilson(trials - successes, trials) == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_an_interval_without_trials_says_nothing() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(7, 7)[1] == 1.0


@pytest.mark.parametrize(
    ("only_first", "only_second", "p"),
    [
        (0, 5, 2 / 32),
        (1, 9, 2 * (1 + 10) / 1024),
        (9, 1, 2 * (1 + 10) / 1024),
        (4, 4, 1.0),
        (0, 0, 1.0),
        # Agresti's approval of a prime minister (Categorical Data Analysis, table 10.1), exact binomial.
        (150, 86, 3.716e-05),
    ],
)
def test_mcnemars_exact_test(only_first: int, only_second: int, p: float) -> None:
    assert mcnemar(only_first, only_second) == pytest.approx(p, rel=2e-4)


def test_the_interval_of_a_paired_difference() -> None:
    """Bonett and Price (2012) add one to either count of pairs that differ, and two to the pairs."""
    low, high = paired(12, 43, 400)
    assert ((low + high) / 2, (high - low) / 2) == pytest.approx((31 / 402, 0.03603), abs=1e-4)
    assert paired(0, 5, 5)[1] == 1.0
