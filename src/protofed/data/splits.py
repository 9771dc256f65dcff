"""Which images a site tests on, where nobody has decided that: drawn by group and label, the same way each time."""

from collections.abc import Sequence

import numpy as np

from protofed.data.files import majority_labels
from protofed.data.partition import stratified_split
from protofed.seeding import numpy_generator

DEFAULT_TEST_SHARE = 0.2


def own_split(
    domain: str, groups: Sequence[tuple[str, str]], labels: Sequence[str], share: float, seed: int
) -> list[str] | None:
    """`train` or `test` for each image: `share` of the groups, stratified by a group's most frequent label.

    A group is never divided. None where there is one group only, so that nothing would be left to test on.
    """
    # Sorted, so that the order of the images does not change who is tested on.
    label_of = dict(sorted(majority_labels(groups, labels).items()))
    if len(label_of) < 2:
        return None
    _, codes = np.unique(np.array(list(label_of.values())), return_inverse=True)
    _, test = stratified_split(codes.astype(np.int64), share, numpy_generator(seed, "manifest", domain))
    names = list(label_of)
    tested = {names[position] for position in test}
    return ["test" if group in tested else "train" for group in groups]
