"""FLOPs of factorizations and transforms of real matrices, of any library.

Letters: m rows, n columns, k the smaller of both. A complex operation takes about four times as many.

Sources: the counts of Golub and Van Loan, *Matrix Computations*, which are those of LAPACK's working note 41 where that
has them; for the SVD those of the R-SVD; for Fourier transforms 5 N log2 N, the convention of FFTW's benchmarks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def cholesky(n: int) -> float:
    """Return the FLOPs of a Cholesky factorization."""
    return n**3 / 3


def lu(m: int, n: int) -> float:
    """Return the FLOPs of an LU factorization with partial pivoting."""
    k = min(m, n)
    return m * n * k - (m + n) * k**2 / 2 + k**3 / 3


def qr(m: int, n: int) -> float:
    """Return the FLOPs of a QR factorization that leaves Q as reflectors."""
    k = min(m, n)
    return 2 * m * n * k - (m + n) * k**2 + 2 * k**3 / 3


def reflectors(m: int, n: int, k: int) -> float:
    """Return the FLOPs of `n` columns of the product of `k` reflectors of length `m`."""
    return 4 * m * n * k - 2 * (m + n) * k**2 + 4 * k**3 / 3


def triangular_solve(n: int, columns: int) -> float:
    """Return the FLOPs of a solve of a triangular system."""
    return n**2 * columns


def tridiagonal_solve(n: int, columns: int) -> float:
    """Return the FLOPs of a solve of a tridiagonal system: 3 for each row, and 5 for each row of each column."""
    return n * (3 + 5 * columns)


def eigh(n: int, *, has_vectors: bool = True) -> float:
    """Return the FLOPs of the eigenvalues of a symmetric matrix."""
    return 9 * n**3 if has_vectors else 4 * n**3 / 3


def eig(n: int, *, has_vectors: bool = True) -> float:
    """Return the FLOPs of the eigenvalues of a matrix, or of its Schur form."""
    return 25 * n**3 if has_vectors else 10 * n**3


def hessenberg(n: int) -> float:
    """Return the FLOPs of a reduction to Hessenberg form."""
    return 10 * n**3 / 3


def tridiagonal(n: int) -> float:
    """Return the FLOPs of a reduction of a symmetric matrix to tridiagonal form."""
    return 4 * n**3 / 3


def svd(m: int, n: int, *, has_vectors: bool = True) -> float:
    """Return the FLOPs of a singular value decomposition."""
    long, short = max(m, n), min(m, n)
    return 6 * long * short**2 + 20 * short**3 if has_vectors else 2 * long * short**2 + 2 * short**3


def fourier(lengths: Sequence[int], *, is_real: bool) -> float:
    """Return the FLOPs of a Fourier transform over dims of these lengths; one side of it may be real."""
    count = math.prod(lengths)
    return (2.5 if is_real else 5.0) * count * math.log2(count) if count > 1 else 0.0
