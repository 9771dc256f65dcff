"""Train a federation of four clients, look at what happened, and write a page to send to a colleague."""

import protofed
from protofed.report import write_report

run = protofed.run(
    "i2pfl",
    data="digits",  # four domains of digits, one client each
    samples_per_client=400,
    rounds=10,
    epochs=2,
    lr=0.03,
    out="runs/first",
)
print(run)
print(run.table()[["round", "cross_entropy", "accuracy.global.average", "bytes.up.total"]])
run.plot().save("runs/accuracy.svg")
run.plot("loss").save("runs/loss.svg")
print("open", write_report(run.path), "in a browser")
