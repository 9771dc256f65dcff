import numpy as np

from protofed.data import load
from protofed.data.lesions import DOMAINS, SIDE, draw_images, load_lesions


def test_lesions_are_where_they_are_said_to_be() -> None:
    """Around the middle of a lesion it is brighter than around the same place of the disc's mirror image."""
    for site in DOMAINS:
        test, places = load_lesions().domains[site].test, draw_images(site, "test")[2]
        assert np.isnan(places[test.y.numpy() == 0]).all()
        brighter = 0
        ill = np.nonzero(test.y.numpy() == 1)[0]
        for number in ill:
            row, column = places[number].astype(int)
            picture = test.x[number].numpy().astype(float).max(0)
            around = picture[row - 4 : row + 5, column - 4 : column + 5].max()
            brighter += around > np.median(picture[picture > 30]) + 20
        assert brighter >= 0.95 * len(ill)


def test_sites_differ_and_are_the_same_every_time() -> None:
    data = load("lesions")
    assert data.image_shape == (3, SIDE, SIDE)
    assert not data.warnings
    means = [domain.test.x.float().mean((0, 2, 3)) for domain in data.domains.values()]
    assert all((left - right).abs().max() > 5 for i, left in enumerate(means) for right in means[:i])
    assert int(data.domains["amber"].test.x.sum()) == int(load("lesions").domains["amber"].test.x.sum())
