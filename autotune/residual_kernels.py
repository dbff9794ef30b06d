"""Kernels of the residual model that scikit-learn does not have: all with fixed parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct, Kernel, Matern

Floats = npt.NDArray[np.float64]

_KNOBS_AT_UNIT_LENGTH = 5


class Alike(Kernel):  # type: ignore[misc]  # scikit-learn carries no types
    """Covariance of sums of independent effects: one of each column's value, and a smaller one of each pair of columns' values.

    With k equal columns k + k (k - 1) / 2 x together^2 (the additive kernel of first and second order of Duvenaud, Nickisch and
    Rasmussen 2011, over values that are equal or not).
    """

    def __init__(self, together: float) -> None:
        self.together = together

    def __call__(self, X: Floats, Y: Floats | None = None, eval_gradient: bool = False) -> Any:  # noqa: N803
        """Covariances, with an empty gradient where one is asked for."""
        alike = sum(np.equal.outer(one, other) for one, other in zip(X.T, (X if Y is None else Y).T, strict=True))
        found = self._effects(np.asarray(alike, dtype=np.float64))
        return (found, np.empty((*found.shape, 0))) if eval_gradient else found

    def diag(self, X: Floats) -> Floats:  # noqa: N803
        """Variances."""
        return np.full(len(X), float(self._effects(np.float64(X.shape[1]))))

    def is_stationary(self) -> bool:
        """It depends on which values are equal only."""
        return True

    def _effects(self, alike: Any) -> Any:
        return alike + alike * (alike - 1.0) / 2.0 * self.together**2


class Across(Kernel):  # type: ignore[misc]  # scikit-learn carries no types
    """How alike two trials are by the studies that they are of, numbered in a single column: 1 within a study.

    Between two studies it is the product of how alike each is to study 0: a common part and an independent one of each (the
    coregionalization of Bonilla, Chai and Williams 2007 with one common part).
    """

    def __init__(self, alike: tuple[float, ...]) -> None:
        self.alike = alike

    def __call__(self, X: Floats, Y: Floats | None = None, eval_gradient: bool = False) -> Any:  # noqa: N803
        """Covariances, with an empty gradient where one is asked for."""
        one, other = (rows[:, 0].astype(np.intp) for rows in (X, X if Y is None else Y))
        alike = np.asarray(self.alike)
        found = np.where(np.equal.outer(one, other), 1.0, np.multiply.outer(alike[one], alike[other]))
        return (found, np.empty((*found.shape, 0))) if eval_gradient else found

    def diag(self, X: Floats) -> Floats:  # noqa: N803
        """Variances."""
        return np.ones(len(X))

    def is_stationary(self) -> bool:
        """It depends on which study a trial is of."""
        return False


class OnColumns(Kernel):  # type: ignore[misc]  # scikit-learn carries no types
    """A kernel with fixed parameters that sees some of the features only."""

    def __init__(self, kernel: Kernel, start: int, stop: int) -> None:
        self.kernel = kernel
        self.start = start
        self.stop = stop

    def __call__(self, X: Floats, Y: Floats | None = None, eval_gradient: bool = False) -> Any:  # noqa: N803
        """Covariances, with an empty gradient where one is asked for."""
        found = self.kernel(self._seen(X), None if Y is None else self._seen(Y))
        return (found, np.empty((*found.shape, 0))) if eval_gradient else found

    def diag(self, X: Floats) -> Floats:  # noqa: N803
        """Variances."""
        return np.asarray(self.kernel.diag(self._seen(X)))

    def is_stationary(self) -> bool:
        """As the kernel inside."""
        return bool(self.kernel.is_stationary())

    def _seen(self, features: Floats) -> Floats:
        return features[:, self.start : self.stop]


def smooth(knobs: int) -> Kernel:
    """A twice differentiable function of so many knobs; distances grow with the root of their number, so lengths do as well."""
    return Matern(np.sqrt(knobs / _KNOBS_AT_UNIT_LENGTH), length_scale_bounds="fixed", nu=2.5)


def linear() -> Kernel:
    """A slope over every column."""
    return DotProduct(0.0, sigma_0_bounds="fixed")


def fixed(deviation: float) -> Kernel:
    """A factor: the variance of what is off by this standard deviation."""
    return ConstantKernel(deviation**2, constant_value_bounds="fixed")
