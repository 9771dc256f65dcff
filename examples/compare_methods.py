"""Which method is better here, and what does it cost? Same images, same initial weights, same clients per round."""

import protofed

result = protofed.compare(
    ["fedavg", "fedproto_avg", "i2pfl"],
    data="digits",
    samples_per_client=400,
    rounds=10,
    epochs=2,
    lr=0.03,
    seeds=[0, 1],
    out="runs/compared",
)
print(result)
print(result.table()[["method", "average", "std", "difference", "bytes_up"]])
result.plot(by="bytes").save("runs/accuracy-by-bytes.svg")
for line in result.warnings():
    print("warning:", line)
