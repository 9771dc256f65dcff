"""Sites send sums once and the server computes the head from them; a site that leaves is subtracted."""

import protofed
from protofed.inference.forget import forget

options = {"data": "digits", "samples_per_client": 400}
run = protofed.run("protoridge", out="runs/one-exchange", **options)
print(run)
print("sent by all sites together:", run.summary["bytes"]["up"]["total"], "bytes")

left = forget(run.path, "syn_generated-0", out="runs/without-syn")
print("without syn_generated-0:", protofed.Run("runs/without-syn"))
print(left.images, "images are forgotten; the sums of", ", ".join(left.left), "remain")
