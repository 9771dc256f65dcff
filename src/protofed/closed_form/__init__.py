"""What methods have in common whose head is computed from sums over sites instead of trained."""
