"""The papers' tables and figures, run again or computed, with the paper's own numbers beside ours."""
