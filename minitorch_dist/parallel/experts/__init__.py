"""Expert parallelism: moe.py divides the experts over the ranks, expert_bias.py keeps them equally busy."""
