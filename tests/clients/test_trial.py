"""What a step of training costs, from a few small ones."""

import pytest

from protofed.clients.trial import seconds_per_sample, trial_batches


def test_batches_that_are_tried_are_small_where_images_are_large():
    assert trial_batches((3, 32, 32), 32) == (32,)
    assert trial_batches((1, 28, 28), 16) == (16,)
    assert trial_batches((3, 64, 64), 32) == (8, 32)
    assert trial_batches((3, 224, 224), 32) == (2, 8)
    assert trial_batches((3, 224, 224), 2) == (2,)


def test_what_a_step_costs_whatever_its_batch_is_not_taken_for_the_cost_of_its_images():
    tried = {2: 0.5 + 2 * 0.01, 8: 0.5 + 8 * 0.01}
    assert seconds_per_sample(tried, 32) == pytest.approx(0.01 + 0.5 / 32)
    assert seconds_per_sample({2: 0.02, 8: 0.08}, 32) == pytest.approx(0.01)


def test_one_batch_or_a_noisy_moment_gives_the_mean():
    assert seconds_per_sample({32: 0.64}, 32) == pytest.approx(0.02)
    assert seconds_per_sample({2: 0.5, 8: 0.4}, 32) == pytest.approx(0.05)
