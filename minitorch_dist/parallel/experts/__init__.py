"""Expert parallelism: moe.py divides the experts over the ranks, once.py sends a token to each once,
expert_bias.py keeps them equally busy."""
