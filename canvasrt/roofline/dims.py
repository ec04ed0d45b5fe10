"""Sizes that depend on the call: sums of products of named dimensions, such as `8*octets_full+length`.

`batch*length/128` is the product divided by 128, rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Dim = int | str
# A size that the builder prints as −1 and for which no formula was found.
UNKNOWN = "?"


def evaluate(dim: Dim, sizes: Mapping[str, int]) -> int:
    """Return the value of `dim` at these sizes. Raises KeyError for a dimension that `sizes` does not have."""
    if isinstance(dim, int):
        return dim
    return sum(_product(term, sizes) for term in dim.split("+"))


def _product(term: str, sizes: Mapping[str, int]) -> int:
    factors, _, block = term.partition("/")
    product = math.prod(int(each) if each.isdigit() else sizes[each] for each in factors.split("*"))
    return -(-product // int(block)) if block else product


def names_in(dim: Dim) -> set[str]:
    """Return the dimensions that a size depends on."""
    if isinstance(dim, int):
        return set()
    factors = (each for term in dim.split("+") for each in term.partition("/")[0].split("*"))
    return {name for name in factors if not name.isdigit()}


def volume(dims: Sequence[Dim], sizes: Mapping[str, int]) -> int:
    """Return the number of elements of a shape."""
    return math.prod(evaluate(dim, sizes) for dim in dims)


def times(factors: Sequence[Dim]) -> Dim:
    """Return the product of sizes. A sum times another size is UNKNOWN."""
    known = math.prod(each for each in factors if isinstance(each, int))
    named = [each for each in factors if isinstance(each, str)]
    if not named:
        return known
    if known == 1 and len(named) == 1:
        return named[0]
    if any("+" in name or "/" in name for name in named):
        return UNKNOWN
    parts = [part for name in named for part in name.split("*")]
    known *= math.prod(int(part) for part in parts if part.isdigit())
    words = sorted(part for part in parts if not part.isdigit())
    return "*".join([str(known)] * (known != 1) + words)


def from_terms(terms: Mapping[tuple[str, ...], int]) -> Dim:
    """Return a sum of products of dimensions. `terms` maps products to their coefficients, and `()` to the constant."""
    parts = []
    for names, factor in sorted(terms.items(), key=lambda item: (-len(item[0]), item[0])):
        if not names:
            parts.append(str(factor))
        elif factor:
            parts.append("*".join([str(factor)] * (factor != 1) + sorted(names)))
    if set(terms) <= {()}:
        return terms.get((), 0)
    return "+".join(parts)


def fix(dim: Dim, sizes: Mapping[str, int]) -> Dim:
    """Return a size with the dimensions in `sizes` replaced by their numbers."""
    if isinstance(dim, int) or dim == UNKNOWN or not names_in(dim) & set(sizes):
        return dim
    known, terms = 0, []
    for term in dim.split("+"):
        product, _, block = term.partition("/")
        names = product.split("*")
        factor = times([sizes.get(n, int(n) if n.isdigit() else n) for n in names])
        if isinstance(factor, int):
            known += -(-factor // int(block)) if block else factor
        else:
            terms.append(f"{factor}/{block}" if block else factor)
    return "+".join([*terms, *([str(known)] if known else [])]) if terms else known
