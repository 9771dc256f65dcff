import colorsys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from protofed.data import AUGMENTATIONS, Augment
from protofed.errors import UserError
from protofed.seeding import generator


def batch(n=6, channels=3, height=9, width=7, seed=0):
    return torch.rand(n, channels, height, width, generator=generator(seed, "test"))


@given(
    st.lists(st.sampled_from(sorted(AUGMENTATIONS)), max_size=4),
    st.sampled_from([1, 3]),
    st.sampled_from([torch.uint8, torch.float32, torch.float64]),
    st.integers(0, 1000),
)
@settings(max_examples=60)
def test_shape_type_and_range_stay(steps, channels, dtype, seed):
    augment = Augment.parse(",".join(steps))
    x = batch(channels=channels, seed=seed)
    x = (x * 255).to(dtype) if dtype == torch.uint8 else x.to(dtype)
    before = x.clone()
    y = augment(x, generator(seed, "augment"))
    assert y.shape == x.shape
    assert y.dtype == dtype
    assert y.min() >= 0
    assert y.max() <= (255 if dtype == torch.uint8 else 1)
    assert torch.equal(x, before)
    assert torch.equal(y, augment(x, generator(seed, "augment")))


@given(st.integers(0, 4), st.integers(0, 1000))
def test_a_crop_is_a_window_of_the_padded_image(padding, seed):
    x = batch(seed=seed)
    padded = F.pad(x, (padding,) * 4)
    for sample, image in zip(Augment.parse(f"crop={padding}")(x, generator(seed, "crop")), padded, strict=True):
        windows = image.unfold(1, 9, 1).unfold(2, 7, 1)
        assert (windows == sample[:, None, None]).all(-1).all(-1).all(0).any()


def test_crops_reach_every_corner():
    x = batch(n=400, channels=1, height=3, width=3)
    y = Augment.parse("crop=1")(x, generator(0, "crop"))
    padded = F.pad(x, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1)
    places = (padded == y[:, :, None, None]).flatten(4).all(-1).flatten(1)
    assert places.any(0).all()


@pytest.mark.parametrize(("step", "axis"), [("flip", 3), ("vflip", 2)])
def test_flips(step, axis):
    x = batch(n=64)
    y = Augment.parse(step)(x, generator(0, step))
    flipped = (y == x.flip(axis)).flatten(1).all(1)
    assert (flipped | (y == x).flatten(1).all(1)).all()
    assert 16 < flipped.sum() < 48
    assert torch.equal(Augment.parse(f"{step}=1")(x, generator(0, step)), x.flip(axis))
    assert torch.equal(Augment.parse(f"{step}=0")(x, generator(0, step)), x)


def test_steps_without_strength_change_nothing():
    x = batch()
    for step in ("crop=0", "rotate=0", "grey=0", "jitter=0"):
        assert torch.allclose(Augment.parse(step)(x, generator(1, step)), x, atol=1e-5), step


def test_rotation_turns_by_the_drawn_angle_on_any_canvas():
    row, column = torch.meshgrid(torch.arange(60) - 29.5, torch.arange(100) - 49.5, indexing="ij")
    disc = ((row**2 + column**2) < 20**2).float().expand(5, 1, 60, 100)
    turned = Augment.parse("rotate=40")(disc, generator(3, "turn"))
    assert (turned - disc).abs().mean() < 0.01
    bar = ((row.abs() < 3) & (column.abs() < 25)).float().expand(5, 1, 60, 100)
    turned = Augment.parse("rotate=40")(bar, generator(3, "turn"))
    drawn = (2 * torch.rand(5, generator=generator(3, "turn")) - 1) * 40
    rows, columns, mixed = ((turned * moment).sum((1, 2, 3)) for moment in (row**2, column**2, row * column))
    measured = torch.rad2deg(torch.atan2(2 * mixed, columns - rows)) / 2
    assert torch.allclose(measured, -drawn, atol=0.5)


def test_resized_crops_stay_inside():
    ramp = torch.linspace(0, 1, 16).view(1, 1, 1, 16).expand(50, 1, 16, 16)
    y = Augment.parse("resized_crop=0.3")(ramp, generator(0, "crop"))
    assert (y.diff(dim=3) >= -1e-6).all()
    span = y[:, 0, 8, -1] - y[:, 0, 8, 0]
    assert span.min() < 0.75
    assert torch.allclose(y, y[:, :, :1].expand_as(y), atol=1e-5)


def test_grey_has_equal_channels():
    y = Augment.parse("grey=1")(batch(), generator(0, "grey"))
    assert torch.allclose(y[:, 0], y[:, 1])
    assert torch.allclose(y[:, 0], y[:, 2])


def test_hue_agrees_with_the_standard_library():
    x = batch(n=1, height=4, width=4)
    y = Augment.parse("hue=0.5")(x, generator(5, "hue"))
    shift = torch.rand(1, generator=generator(5, "hue")).item() - 0.5
    for before, after in zip(x[0].flatten(1).T.tolist(), y[0].flatten(1).T.tolist(), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*before)
        assert after == pytest.approx(colorsys.hsv_to_rgb((hue + shift) % 1, saturation, value), abs=1e-5)


def test_brightness_scales_and_contrast_keeps_the_mean():
    x = 0.4 + 0.1 * batch()
    y = Augment.parse("brightness=0.4")(x, generator(0, "b"))
    ratio = y / x
    assert torch.allclose(ratio, ratio[:, :1, :1, :1].expand_as(ratio), atol=1e-5)
    assert ratio.min() >= 0.6 - 1e-5
    assert ratio.max() <= 1.4 + 1e-5
    grey = 0.4 + 0.1 * batch(channels=1)
    changed = Augment.parse("contrast=0.5")(grey, generator(0, "c"))
    assert torch.allclose(changed.mean((1, 2, 3)), grey.mean((1, 2, 3)), atol=1e-5)


def test_the_text_form():
    augment = Augment.parse("resized_crop=0.7, flip,jitter=0.4,grey=0.1,rotate=5")
    assert augment.steps == (("resized_crop", 0.7), ("flip", 0.5), ("jitter", 0.4), ("grey", 0.1), ("rotate", 5.0))
    assert Augment.parse(str(augment)) == augment
    assert not Augment.parse("none")
    assert Augment.parse("") == Augment()
    assert str(Augment()) == "none"
    assert Augment.parse("crop")
    x = batch()
    assert Augment()(x, generator(0, "none")) is x


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        ("crup,flip", "did you mean crop"),
        ("flip=2", "between 0 and 1"),
        ("flip=often", "'often' is not a number"),
        ("crop=1.5", "for example crop=4"),
        ("jitter=0.9", "between 0 and 0.5"),
        ("crop,,flip", "unknown augmentation ''"),
        ("rotate=nan", "between 0 and 180"),
    ],
)
def test_mistakes_get_one_line(spec, line):
    with pytest.raises(UserError, match=line):
        Augment.parse(spec)
