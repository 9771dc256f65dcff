"""Which part of an image led to a decision, and do the sites agree?"""

import protofed
from protofed.explain import explain

run = protofed.run("i2pfl", data="digits", samples_per_client=400, rounds=10, epochs=2, lr=0.03, out="runs/explained")
explained = explain(run.path, domain="mnist", count=3)
print(explained)
print(explained.table())
for sentence in explained["findings"]:
    print("-", sentence)
explained.plot(0).save("runs/first-image.png")
print("open", explained.path / "index.html", "in a browser")
