"""Image files in folders: train on two sites, classify new images, and export the model for another program.

Replace the images that `draw_images` creates with your own: my-images/SITE/CLASS/FILE.png. Sites without a test
folder hold out a fifth of their images for testing.
"""

from pathlib import Path

import numpy as np
from PIL import Image

import protofed
from protofed.inference import Classifier, export, predict

IMAGES, NEW = Path("my-images"), Path("new-images")


def draw_images() -> None:
    """Rings and discs; the second site has a noisier and darker camera."""
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[:32, :32] - 15.5
    for site, light, noise in (("north", 200, 10), ("south", 120, 40)):
        for number in range(60):
            radius = np.hypot(rows - rng.uniform(-3, 3), columns - rng.uniform(-3, 3))
            shape, name = ((radius < 9), "disc") if number % 2 else ((radius < 9) & (radius > 5), "ring")
            pixels = np.clip(light * shape + rng.normal(30, noise, shape.shape), 0, 255).astype(np.uint8)
            folder = NEW if number < 4 else IMAGES / site / name
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / f"{site}-{name}-{number}.png")


draw_images()
run = protofed.run("fedavg", data=str(IMAGES), rounds=10, epochs=2, lr=0.03, out="runs/own-images")
print(run)
model = Classifier(run.path)
print(predict(model, NEW, "runs/predictions.csv"))
print(Path("runs/predictions.csv").read_text())
export(model, "safetensors", "runs/model.safetensors")
