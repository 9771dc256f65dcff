"""The two ends between which federated methods lie: all data in one place, and one average after training alone."""

from dataclasses import replace

from protofed.method import Plan, knob
from protofed.methods.fedavg import FedAvg
from protofed.registry import register


@register("centralized")
class Centralized(FedAvg):
    """One model trained on all clients' data, for as many epochs as a client would train: the upper bound."""

    paper = "None: the upper bound for comparisons"
    sends_up = "nothing (the data are pooled)"
    sends_down = "nothing"
    readings = ("The optimiser state is kept across rounds, as in one long training (persist_optimizer).",)
    pools_data = True

    persist_optimizer: bool = knob("keep momentum and moments between rounds instead of resetting them", default=True)


@register("single")
class Single(FedAvg):
    """Clients train alone for the whole budget; their models are averaged once, at the end."""

    paper = "The baseline named Single in FedMP, 2025"
    sends_up = "weights, sample count, once"
    sends_down = "weights, once"
    readings = (
        "The paper does not say whether the average is weighted; we weight by samples (weighting).",
        "The averaged model is scored; --evaluate-local adds the often higher accuracy of the clients' own models.",
        "A schedule counts rounds, and there is only one: the learning rate stays constant.",
    )

    def plan(self, plan: Plan) -> Plan:
        """One round of all epochs."""
        return replace(plan, epochs=(sum(plan.epochs),))
